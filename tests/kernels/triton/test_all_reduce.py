"""Sums over ranks. The ranks of `one_shot_all_reduce` are processes: they wait for each other within a kernel."""

import mmap
import multiprocessing
from pathlib import Path

import numpy as np
import torch

from pipeline.kernels.triton.all_reduce import (
    BLOCK,
    MAX_PROGRAMS,
    one_shot_all_reduce,
    sum_partials,
    symmetric_words,
)

SHAPES = [(1, 3, 5), (2, 2, BLOCK + 7), (3, 1, 11), (1, 3, BLOCK - 1), (2, 2, 9)]
"""P, T and H of launches in a row: some programs have part in all of them, others in some."""


def parts_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors in float32, in their order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def test_split_k_partials_are_added_in_order() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        partials = parts_of(0)[1].to(dtype)
        out = torch.empty(partials.shape[1:])
        sum_partials(out, partials)
        assert torch.equal(out, in_order(list(partials)))


def _rank(rank: int, memory: mmap.mmap, num_ranks: int, folder: Path) -> None:
    words = np.frombuffer(memory, np.int32)
    begin, size = words.ctypes.data, 4 * symmetric_words(num_ranks)
    addresses = torch.tensor([begin + other * size for other in range(num_ranks)])
    counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32)
    results = []
    for partials in parts_of(rank):
        out = partials[0] if len(partials) == 1 else torch.empty(partials.shape[1:])
        one_shot_all_reduce(out, partials, addresses, counts, rank)
        results.append(out.numpy())
    np.savez(folder / f"{rank}.npz", *results)


def test_one_shot_all_reduce_adds_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    num_ranks = 3
    memory = mmap.mmap(-1, 4 * symmetric_words(num_ranks) * num_ranks)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, memory, num_ranks, tmp_path)) for rank in range(num_ranks)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(num_ranks)]
    parts = [parts_of(rank) for rank in range(num_ranks)]
    for i in range(len(SHAPES)):
        expected = in_order([in_order(list(of_rank[i])) for of_rank in parts])
        for result in found:
            np.testing.assert_array_equal(result[f"arr_{i}"], expected.numpy())
