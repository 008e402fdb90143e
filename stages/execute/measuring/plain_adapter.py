"""A LoRA adapter for measuring, whose values do not matter."""

import tempfile
from pathlib import Path
from typing import get_args

import numpy as np

from pipeline.config.settings import Settings
from pipeline.lora.adapter_file import DTYPES, AdapterFile, Pair, Target, write
from pipeline.lora.convert import dtype_of, shape_of
from pipeline.runtime.model_folder import ModelConfig

RANK = 16


def plain_adapter(settings: Settings, config: ModelConfig) -> AdapterFile:
    """Of zeros, for every projection that adapters may change. Its file has no name any more."""
    dtype, rank = dtype_of(settings), min(RANK, settings.lora.max_lora_rank)
    pairs = []
    for layer in range(config.num_layers):
        for target in get_args(Target):
            is_mlp = target in ("gate_proj", "up_proj", "down_proj")
            if is_mlp and (config.has_experts(layer) or (target == "gate_proj" and not config.gated)):
                continue
            outputs, inputs = shape_of(config, target)
            a, b = (np.zeros(shape, DTYPES[dtype]) for shape in ((rank, inputs), (outputs, rank)))
            pairs.append(Pair(layer, target, a, b))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        write(path, dtype, pairs)
        return AdapterFile(path)
