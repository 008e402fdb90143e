"""Copies of blocks against indexing."""

import pytest
import torch

from pipeline.kernels.triton import copy

A, M = 6, 11


@pytest.mark.parametrize("width", [64, 2048, 2500])
def test_blocks_are_gathered_scattered_and_forked(width: int) -> None:
    torch.manual_seed(width)
    memory = torch.randint(-(2**31), 2**31 - 1, (A, M, width), dtype=torch.int32)
    before = memory.clone()
    packed = torch.zeros(5, A, width, dtype=torch.int32)
    sources = torch.tensor([7, 0, 10], dtype=torch.int32)
    copy.gather(packed, memory, sources)
    assert torch.equal(packed[:3], before[:, sources.long()].transpose(0, 1))
    assert not packed[3:].any() and torch.equal(memory, before)

    targets = torch.tensor([3, 9, 1], dtype=torch.int32)
    copy.scatter(memory, targets, packed)
    expected = before.clone()
    expected[:, targets.long()] = before[:, sources.long()]
    assert torch.equal(memory, expected)

    copy.fork(memory, torch.tensor([2, 4], dtype=torch.int32), torch.tensor([10, 6], dtype=torch.int32))
    expected[:, [2, 4]] = expected[:, [10, 6]]
    assert torch.equal(memory, expected)
