"""Finds how a checkpoint is quantized, by the `quantization_config` of its config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.quantized.auto_round import AutoRoundConfig, auto_round
from pipeline.stages.prepare.quantized.awq import AwqConfig, AwqScheme
from pipeline.stages.prepare.quantized.bitsandbytes import BitsAndBytesConfig, BitsAndBytesScheme
from pipeline.stages.prepare.quantized.compressed_tensors import CompressedTensorsConfig, CompressedTensorsScheme
from pipeline.stages.prepare.quantized.fp8 import Fp8Config, Fp8Scheme
from pipeline.stages.prepare.quantized.gptq import GptqConfig, GptqScheme
from pipeline.stages.prepare.quantized.mxfp4 import Mxfp4Config, Mxfp4Scheme
from pipeline.stages.prepare.quantized.scheme import Scheme, SchemeFault
from pipeline.stages.prepare.sources.source import ModelError

KEY = "quantization_config"

METHODS: dict[str, tuple[type[msgspec.Struct], Callable[[Any], Scheme]]] = {
    "gptq": (GptqConfig, GptqScheme),
    "awq": (AwqConfig, AwqScheme),
    "auto-round": (AutoRoundConfig, auto_round),
    "compressed-tensors": (CompressedTensorsConfig, CompressedTensorsScheme),
    "bitsandbytes": (BitsAndBytesConfig, BitsAndBytesScheme),
    "fp8": (Fp8Config, Fp8Scheme),
    "fbgemm_fp8": (Fp8Config, Fp8Scheme),
    "mxfp4": (Mxfp4Config, Mxfp4Scheme),
}
"""The keys that matter and the scheme of each `quant_method`."""
ALIASES = {"intel/auto-round": "auto-round", "auto_round": "auto-round", "autoround": "auto-round"}


def method_of(config: Mapping[str, Any], path: Path) -> str | None:
    """The `quant_method` of a config.json; None if the checkpoint isn't quantized. Raises ModelError if it is not
    served."""
    settings = config.get(KEY)
    if not settings:
        return None
    found = settings.get("quant_method") if isinstance(settings, dict) else settings
    if found is None and isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        found = "bitsandbytes"  # transformers knows these files by the same keys
    method = ALIASES.get(found, found) if isinstance(found, str) else None
    if not isinstance(settings, dict) or method not in METHODS:
        raise ModelError(
            f"{path}: {KEY} has quant_method {shown(found)}, which is not served; served are {', '.join(METHODS)}. Or "
            "use the unquantized checkpoint, or a .gguf file"
        )
    return method


def scheme_of(config: Mapping[str, Any], path: Path) -> Scheme | None:
    """The scheme of a config.json; None if the checkpoint isn't quantized. Raises ModelError, naming the key, if it is
    not served."""
    method = method_of(config, path)
    if method is None:
        return None
    kind, scheme = METHODS[method]
    try:
        return scheme(msgspec.convert(config[KEY], kind))
    except (msgspec.ValidationError, SchemeFault) as fault:
        raise ModelError(f"{path}: {KEY} ({method}): {fault}") from fault
