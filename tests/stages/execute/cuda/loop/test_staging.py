"""The words that encode a step, read back by the kernel that applies them."""

import numpy as np
import pytest
import torch

from pipeline.kernels.triton import step as ends
from pipeline.kernels.triton.rows import RowState
from pipeline.stages.execute.cuda.device import Interpreted
from pipeline.stages.execute.cuda.rows.batches import EMPTY, Batch
from pipeline.stages.execute.cuda.rows.staging import NUM_SLOTS, Run, Staging, num_words, split_runs


def runs_of(lengths: list[int], seed: int) -> list[Run]:
    random, runs, at = np.random.default_rng(seed), [], 3
    for length in lengths:
        runs.append((at, random.integers(0, 1000, length).astype(np.int32)))
        at += length + 2
    return runs


def applied(state: "np.ndarray[tuple[int], np.dtype[np.int32]]", runs: list[Run]) -> None:
    for target, numbers in runs:
        state[target : target + len(numbers)] = numbers


@pytest.mark.parametrize("one_each", [True, False])
def test_kernels_read_the_staged_values(one_each: bool) -> None:
    staging = Staging(Interpreted(), 5, 64, 9)
    counts = np.array([1, 1] if one_each else [3, 9], np.int32)
    batch = Batch(
        rows=np.array([4, 2], np.int32),
        starts=np.array([7, 0], np.int32),
        counts=counts,
        offsets=np.cumsum(counts, dtype=np.int32) - counts,
        num_tokens=int(counts.sum()),
        sampled=np.array([1], np.int32),
        sample_rows=np.array([2], np.int32),
    )
    runs = runs_of([1, 30, 2], 0)
    slot = staging.take()
    staging.fill(slot, batch, runs, one_each=one_each)
    words = staging.words.numpy()
    assert words[:4].tolist() == [batch.num_tokens, 2, 1, 3]
    for i, expected in enumerate(([4, 2], [7, 0], counts.tolist(), batch.offsets.tolist(), [1])):
        assert words[ends.HEADER + 5 * i :][: len(expected)].tolist() == expected
    if not one_each:
        at = words[ends.Head.TOKENS_AT]
        assert words[at : at + 12].tolist() == [0] * 3 + [1] * 9
    state = torch.zeros(100, dtype=torch.int32)
    empty = torch.zeros((1, 1), dtype=torch.int32)
    ends.apply(RowState(state, empty, empty, empty, empty), staging.words)
    expected_state = np.zeros(100, np.int32)
    applied(expected_state, runs)
    np.testing.assert_array_equal(state.numpy(), expected_state)


@pytest.mark.parametrize("room", [4, 5, 7, 20, 100, 1000])
def test_changes_that_do_not_fit_are_split(room: int) -> None:
    runs = runs_of([5, 1, 40, 3, 17], 1)
    whole, pieces = np.zeros(200, np.int32), np.zeros(200, np.int32)
    applied(whole, runs)
    for _ in range(200):
        first, runs = split_runs(runs, room)
        assert num_words(first) <= room and (first or not runs)
        applied(pieces, first)
        if not runs:
            break
    np.testing.assert_array_equal(pieces, whole)
    assert not runs


def test_a_slot_in_use_is_not_reused() -> None:
    staging = Staging(Interpreted(), 2, 16, 2)
    slots = [staging.take() for _ in range(NUM_SLOTS)]
    assert len({id(slot) for slot in slots}) == NUM_SLOTS
    with pytest.raises(AssertionError, match="in flight"):
        staging.take()
    staging.give(slots[3])
    assert staging.take() is slots[3]
    assert staging.room(EMPTY) > 2 * 16
