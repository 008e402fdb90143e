"""Files of models with short convolutions: LFM2 and its mixtures of experts."""

from typing import Any

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import ShortConv
from pipeline.stages.prepare.families.recurrent.short_conv import TAPS
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.architecture import GgufArchitecture, GgufKeys, experts_of
from pipeline.stages.prepare.sources.source import ModelError

LAYER_NAMES = {
    "shortconv.in_proj": "short_conv.in_proj",
    "shortconv.conv": "short_conv.conv",
    "shortconv.out_proj": "short_conv.out_proj",
}


def _read(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """Layers without KV heads have a convolution, as in llama.cpp."""
    metadata, name = keys.metadata, f"{keys.architecture}.shortconv.l_cache"
    taps = metadata.need(name, int)
    if taps not in TAPS:
        what = f"it must be an integer from {TAPS.start} to {TAPS.stop - 1}"
        raise ModelError(f"{metadata.path}: {name} is {shown(taps)}; {what}")
    heads = metadata.list_of(f"{keys.architecture}.attention.head_count_kv", int) or []
    layers = [i for i, num in enumerate(heads) if num == 0]
    return {"short_conv": ShortConv(layers=layers, taps=taps) if layers else None}


def _read_moe(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {**_read(keys, model), "experts": experts_of(keys, model, normalized=True, reads_router=True)}


NAMES = {"model.norm": "token_embd_norm"}
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "lfm2": GgufArchitecture(
        models="LFM2, LFM2.5", always={"qk_norm": True}, read=_read, skips_attention=True, names=NAMES
    ),
    "lfm2moe": GgufArchitecture(
        models="LFM2 8B-A1B, 24B-A2B",
        model_type="lfm2_moe",
        always={"qk_norm": True},
        read=_read_moe,
        reads_experts=True,
        skips_attention=True,
        names=NAMES,
    ),
}
