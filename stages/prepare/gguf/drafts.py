"""Layers of .gguf files behind those of the model, which predict further tokens (MTP): they are left out."""

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.file import GgufTensor

DRAFTS = "nextn_predict_layers"
"""The key with their number, which `block_count` includes."""


def split_drafts(tensors: dict[str, GgufTensor], num_layers: int) -> list[str]:
    """Remove the tensors of layers that draft. Returns a line about them."""
    dropped = [name for name in tensors if name.startswith("blk.") and _layer(name) >= num_layers]
    for name in dropped:
        del tensors[name]
    if not dropped:
        return []
    return [f"ignored {shown(dropped[0])} and {len(dropped) - 1} more: multi-token prediction is not supported"]


def _layer(name: str) -> int:
    number = name.split(".")[1]
    return int(number) if number.isdecimal() else -1
