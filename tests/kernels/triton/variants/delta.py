"""Gated delta layers: heads of Qwen3.5 and OLMo hybrid."""

from typing import Any

import torch

from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors
from pipeline.kernels.recurrent.delta_shape import TAPS, DeltaShape
from pipeline.kernels.triton.delta import delta_rule
from pipeline.kernels.triton.rows import StepArrays


def launches() -> None:
    ints = torch.zeros(256, dtype=torch.int32)
    arrays: list[Any] = [
        *[ints] * 6,
        torch.zeros(256, dtype=torch.int64),
        *[ints] * 3,
        torch.zeros(257, 8, dtype=torch.int32),
    ]
    step = StepArrays(*arrays)
    for shape in (DeltaShape(16, 16, 128, 128), DeltaShape(16, 32, 128, 128), DeltaShape(30, 30, 96, 192)):
        floats = torch.zeros(256, shape.inputs)
        vectors = DeltaVectors(
            *(torch.zeros(TAPS, shape.channels), torch.zeros(shape.value_heads), torch.zeros(shape.value_heads)),
            torch.zeros(shape.value_dim),
        )
        values, out = torch.zeros(256, shape.values), torch.zeros(256, shape.values, dtype=torch.bfloat16)
        slots = torch.zeros(4, shape.slot)
        delta_rule(out, values, floats, slots, ints, ints, step, vectors, DeltaOptions(shape, 1e-6))
