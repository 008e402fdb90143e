"""A LoRA adapter for measuring, whose values do not matter."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np

from pipeline.config.settings import Settings
from pipeline.lora.adapter_file import DTYPES, AdapterFile, AnyArray, Pair, Target, write
from pipeline.lora.convert import dtype_of, shape_of
from pipeline.runtime.model.model_config import ModelConfig

RANK = 16


def plain_adapter(settings: Settings, config: ModelConfig) -> AdapterFile:
    """Of zeros, for every projection that adapters may change. Its file has no name any more."""
    dtype, rank = dtype_of(settings), min(RANK, settings.lora.max_lora_rank)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        write(path, dtype, pairs_of(config, rank, lambda shape: np.zeros(shape, DTYPES[dtype])))
        return AdapterFile(path)


def pairs_of(config: ModelConfig, rank: int, make: Callable[[tuple[int, int]], AnyArray]) -> list[Pair]:
    """The matrices of an adapter of every projection; `make` returns an array of a shape."""
    pairs = []
    for layer in range(config.num_layers):
        for target in get_args(Target):
            is_mlp = target in ("gate_proj", "up_proj", "down_proj")
            if is_mlp and (config.has_experts(layer) or (target == "gate_proj" and not config.gated)):
                continue
            outputs, inputs = shape_of(config, target)
            pairs.append(Pair(layer, target, make((rank, inputs)), make((outputs, rank))))
    return pairs
