"""B (A x) of each token's adapter, on top of a linear layer's result."""

import pytest
import torch

from pipeline.kernels.triton import lora
from pipeline.kernels.triton.lora import LoraMatrices
from tests.kernels.triton.gemms import random

NUM_SLOTS, MAX_RANK = 3, 20
RANKS = torch.tensor([[16, 0, 3], [20, 7, 1], [0, 0, 0]], dtype=torch.int32)
"""Of each slot and projection."""


def make(num_inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> LoraMatrices:
    """Matrices that are views of longer ones, as a slot has those of all layers. Beyond the ranks they are NaN, which
    nothing may read."""
    num = len(outputs)
    a_size, b_size = num * MAX_RANK * num_inputs, MAX_RANK * sum(outputs)
    memory = random(NUM_SLOTS, 5 + a_size + b_size, seed=1).to(dtype)
    a = memory[:, 5 : 5 + a_size].view(NUM_SLOTS, num, MAX_RANK, num_inputs)
    b = memory[:, 5 + a_size :].view(NUM_SLOTS, MAX_RANK, sum(outputs))
    for slot in range(NUM_SLOTS):
        begin = 0
        for index, size in enumerate(outputs):
            rank = int(RANKS[slot, index])
            a[slot, index, rank:] = float("nan")
            b[slot, rank:, begin : begin + size] = float("nan")
            begin += size
    ends = tuple(int(end) for end in torch.tensor(outputs).cumsum(0))
    return LoraMatrices(a, b, RANKS[:, :num], ends)


def expected_of(out: torch.Tensor, x: torch.Tensor, adapters: list[int], matrices: LoraMatrices) -> torch.Tensor:
    found = out.double()
    for token, slot in enumerate(adapters):
        begin = 0
        for index, end in enumerate(matrices.ends):
            if slot >= 0 and (rank := int(RANKS[slot, index])):
                small = matrices.a[slot, index, :rank].double() @ x[token].double()
                found[token, begin:end] += small @ matrices.b[slot, :rank, begin:end].double()
            begin = end
    return found


@pytest.mark.parametrize("outputs", [(96, 40, 40), (130, 130), (48,)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_each_token_has_the_matrices_of_its_adapter(
    outputs: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    adapters = [1, -1, 0, 2, 1, -1, 0]
    num_inputs = 300
    matrices = make(num_inputs, outputs, dtype)
    x, out = random(len(adapters), num_inputs, seed=2).to(dtype), random(len(adapters), sum(outputs), seed=3).to(dtype)
    before, expected = out.clone(), expected_of(out, x, adapters, matrices)
    shrunk = lora.scratch(len(adapters), MAX_RANK, "cpu").fill_(float("nan"))
    lora.add(out, x, torch.tensor(adapters, dtype=torch.int32), matrices, shrunk)
    scale = float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) <= tolerance * scale
    for token, slot in enumerate(adapters):
        if slot in (-1, 2):
            assert torch.equal(out[token], before[token])
    alone = before[4:5].clone()
    lora.add(alone, x[4:5], torch.tensor(adapters[4:5], dtype=torch.int32), matrices, shrunk)
    assert torch.equal(alone[0], out[4]), "the same bits alone"
