"""AutoRound checkpoints: the layouts of GPTQ and AWQ under another name.

`packing_format` names the layout: "auto_round:auto_gptq" is GPTQ's with zero points minus 1, "auto_round" and
"auto_round:gptqmodel" are GPTQ's with zero points as they are, "auto_round:auto_awq" is AWQ's. Files of older releases
call the key `backend`, and name kernels instead ("auto_round:exllamav2"), with zero points as they are.

Source: `dynamic_import_quant_linear_for_packing` in auto_round/export/export_to_autoround/export.py.
"""

from typing import Any

import msgspec

from pipeline.stages.prepare.quantized.awq import AwqConfig, AwqScheme
from pipeline.stages.prepare.quantized.gptq import GptqConfig, GptqScheme
from pipeline.stages.prepare.quantized.scheme import Scheme, SchemeFault, Size

GPTQ = ("auto_round:auto_gptq", "auto_round:gptq")
ZEROS_AS_THEY_ARE = (
    *("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2", "auto_round:triton"),
    *("autoround:exllamav2", "autoround:tritonv2"),
)
AWQ = ("auto_round:auto_awq", "auto_round:awq")


class AutoRoundConfig(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter."""

    bits: Size
    group_size: Size = -1
    sym: bool = True
    packing_format: str | None = None
    backend: str | None = None
    data_type: str = "int"
    act_bits: Size | None = None
    rotation_config: dict[str, Any] | None = None


def auto_round(config: AutoRoundConfig) -> Scheme:
    """The scheme of the layout. Raises SchemeFault if the config has something that isn't served."""
    if not config.data_type.startswith("int"):
        raise SchemeFault(f"data_type is {config.data_type!r}; with auto-round, 'int' is served")
    if config.act_bits is not None and config.act_bits < 16:
        raise SchemeFault(f"act_bits is {config.act_bits}; with auto-round, 16-bit activations are served")
    if config.rotation_config:
        raise SchemeFault("rotation_config is set, but rotated weights are not served")
    layout = config.packing_format or config.backend or GPTQ[0]
    if layout in AWQ:
        return AwqScheme(AwqConfig(bits=config.bits, group_size=config.group_size), "auto-round in AWQ's layout")
    if layout not in (*GPTQ, *ZEROS_AS_THEY_ARE):
        served = ", ".join(map(repr, (*GPTQ, *ZEROS_AS_THEY_ARE[:2], *AWQ)))
        raise SchemeFault(f"packing_format is {layout!r}; with auto-round, served are {served}")
    gptq = GptqConfig(bits=config.bits, group_size=config.group_size, sym=config.sym)
    return GptqScheme(gptq, "auto-round", zeros_minus_one=layout in GPTQ)
