"""Drivers of the CPU library for every instruction set of this machine, and models for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from torch import Tensor

from pipeline.kernels.cpu import build
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.stages.execute.cpu import backend
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.k_quants import quantize
from tests.kernels.cpu.samplers import EMULATED
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import Driver, settings

ISAS = [*available(), *EMULATED]


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, num).tolist()


def write(folder: Path, config: ModelConfig, formats_of: Sequence[Format] = ("bf16",)) -> None:
    """A random model whose matrices are in these formats, in turn."""
    tensors: dict[str, Tensor] = {}
    formats: dict[str, str] = {}
    for i, (name, tensor) in enumerate(checkpoints.reference_model(config).state_dict().items()):
        format = formats_of[i % len(formats_of)]
        if tensor.dim() == 1:
            tensors[name] = tensor
        elif not (name == "lm_head.weight" and config.tie_embeddings):
            tensors[name] = quantize(tensor, format).data
            if format != "bf16":
                formats[format_key(name)] = format
    save_file(tensors, folder / "model.safetensors", formats)
    config.save(folder)


@contextmanager
def emulation(isa: str) -> Iterator[str]:
    """The value of `execute.kernels` for an instruction set. In the context it is emulated, if `isa` says so."""
    if isa not in EMULATED:
        yield isa
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "available", lambda: [EMULATED[isa]])
        patch.setattr(build, "build", partial(build.build, emulate=True))
        yield EMULATED[isa]


class Native(Driver):
    """A driver of the library, which keeps logits only if `keep_logits` is set."""

    def __init__(self, folder: Path, isa: str, keep_logits: bool = True, *, swap_bytes: int = 0, **how: Any) -> None:
        with emulation(isa) as kernels:
            config = settings(dtype="bfloat16", kernels=kernels, **{"threads": 2, "max_num_seqs": 16, **how})
            self.runner = CpuRunner(config, folder, memoryview(bytearray(swap_bytes)) if swap_bytes else None)
        assert isinstance(self.runner.program, NativeProgram)
        self.program = self.runner.program
        if keep_logits:
            self.program.keep_logits()
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()
