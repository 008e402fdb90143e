"""Both ends of a step against plain loops: random rows, changes, ragged batches with padding and ended rows."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton import step as ends
from pipeline.kernels.triton.rows import NUM_FIELDS, Field, RowState, StepArrays

MAX_ROWS, MAX_LEN, NUM_BLOCKS, MAX_STOPS = 9, 48, 3, 5
MAX_SAMPLES = 30
PADDING_ROW = MAX_ROWS
POISON = 77
RESULT_AT = 32


class Machine:
    """Rows and words as an executor has them, and a step's arrays, filled with garbage."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        num = MAX_ROWS + 1
        shapes = [(num, NUM_FIELDS), (num, MAX_LEN), (num, NUM_BLOCKS), (num, MAX_STOPS)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.begins = np.cumsum([0, *sizes[:-1]]).tolist()
        state = torch.zeros(sum(sizes), dtype=torch.int32)
        views = [state[a : a + b].view(shape) for a, b, shape in zip(self.begins, sizes, shapes, strict=True)]
        self.rows = RowState(state, *views)
        params, ids, blocks, stops = (view.numpy() for view in views)
        self.params, self.ids, self.blocks, self.stops = params, ids, blocks, stops
        ids[:] = self.random.integers(0, 1000, ids.shape)
        blocks[:] = self.random.permutation(num * NUM_BLOCKS).reshape(blocks.shape)
        stops[:] = self.random.integers(0, 1000, stops.shape)
        params[:, Field.NUM_IDS] = self.random.integers(1, MAX_LEN - 1, num)
        params[:, Field.NUM_STOPS] = self.random.integers(0, MAX_STOPS + 1, num)
        params[:, Field.ENDED] = self.random.random(num) < 0.3
        params[PADDING_ROW, Field.ENDED] = 1
        self.words = torch.full((4096,), POISON, dtype=torch.int32)
        self.stamps = torch.zeros(4, dtype=torch.int32)

    def step(self, num_tokens: int, num_entries: int, num_samples: int) -> StepArrays:
        def ints(num: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((num,), POISON, dtype=dtype)

        arrays: list[Any] = [ints(num_entries) for _ in range(4)]
        arrays += ints(num_tokens), ints(num_tokens), ints(num_tokens, torch.int64)
        arrays += *(ints(num_samples) for _ in range(3)), self.rows.blocks
        return StepArrays(*arrays)

    def send(self, entries: list[tuple[int, int, int, int]], runs: list[tuple[int, list[int]]] = ()) -> None:  # type: ignore[assignment]
        """Write words as `Staging` does; each entry is (row, start, count, number of last tokens that are sampled)."""
        words = self.words.numpy()
        words[: ends.words_of(MAX_ROWS, MAX_SAMPLES)] = POISON
        counts = [entry[2] for entry in entries]
        offsets = np.cumsum([0, *counts])[:-1].tolist() if counts else []
        ends_of = zip(np.cumsum(counts).tolist(), entries, strict=True)
        sampled = [end - num + i for end, (_, _, _, num) in ends_of for i in range(num)]
        words[:4] = sum(counts), len(entries), len(sampled), len(runs)
        lists = [[entry[0] for entry in entries], [entry[1] for entry in entries], counts, offsets, sampled]
        for i, numbers in enumerate(lists):
            words[ends.HEADER + i * MAX_ROWS :][: len(numbers)] = numbers
        at = ends.words_of(MAX_ROWS, MAX_SAMPLES)
        words[ends.Head.RUNS_AT] = at
        payload = at + 3 * len(runs)
        for target, numbers in runs:
            words[at : at + 3] = target, len(numbers), payload
            words[payload : payload + len(numbers)] = numbers
            at, payload = at + 3, payload + len(numbers)
        words[ends.Head.TOKENS_AT], words[ends.Head.RESULT_AT] = payload, RESULT_AT
        words[payload : payload + sum(counts)] = np.repeat(np.arange(len(entries)), counts)


@pytest.mark.parametrize("num_runs", [0, 1, 40])
def test_apply_writes_runs_and_nothing_else(num_runs: int) -> None:
    machine = Machine(num_runs)
    state = machine.rows.state.numpy()
    expected, runs, at = state.copy(), [], 0
    for _ in range(num_runs):
        length = int(machine.random.integers(1, 9))
        at += int(machine.random.integers(0, 3))
        numbers = machine.random.integers(-5, 2**31 - 1, length).tolist()
        runs.append((at, numbers))
        expected[at : at + length] = numbers
        at += length
    machine.send([], runs)
    ends.apply(machine.rows, machine.words)
    np.testing.assert_array_equal(state, expected)


def test_a_run_may_be_longer_than_one_block_of_a_program() -> None:
    numbers = list(range(3000))
    state = torch.zeros(4000, dtype=torch.int32)
    empty = torch.zeros((1, 1), dtype=torch.int32)
    machine = Machine(0)
    machine.send([], [(500, numbers)])
    ends.apply(RowState(state, empty, empty, empty, empty), machine.words)
    assert state.tolist() == [0] * 500 + numbers + [0] * 500


@pytest.mark.parametrize("seed", range(6))
def test_prepare_fills_a_ragged_batch_with_padding(seed: int) -> None:
    machine = Machine(seed)
    entries = []
    for row in machine.random.permutation(MAX_ROWS)[: seed + 2].tolist():
        start = int(machine.random.integers(0, 20))
        count = int(machine.random.integers(1, 25)) if row % 2 else 1
        entries.append((row, start, count, int(machine.random.integers(0, min(count, 4) + 1))))
    num_tokens = sum(count for _, _, count, _ in entries)
    step = machine.step(num_tokens + 5, MAX_ROWS, MAX_SAMPLES)
    machine.send(entries)
    ends.prepare(step, machine.rows, machine.words, machine.stamps, MAX_ROWS, one_each=False)
    _check(machine, step, entries)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 7])
def test_prepare_of_a_decode_step_reads_no_token_entries(num_rows: int) -> None:
    machine = Machine(num_rows)
    rows = machine.random.permutation(MAX_ROWS)[:num_rows].tolist()
    entries = [(row, int(machine.params[row, Field.NUM_IDS]) - 1, 1, 1) for row in rows]
    step = machine.step(8, 8, 8)
    machine.send(entries)
    machine.words[ends.Head.TOKENS_AT] = 10**6
    ends.prepare(step, machine.rows, machine.words, machine.stamps, MAX_ROWS, one_each=True)
    _check(machine, step, entries)


def _check(machine: Machine, step: StepArrays, entries: list[tuple[int, int, int, int]]) -> None:
    tokens, offset, sampled = [], 0, []
    for i, (row, start, count, num_samples) in enumerate(entries):
        dead = bool(machine.params[row, Field.ENDED])
        given = [int(array[i]) for array in (step.rows, step.starts, step.counts, step.offsets)]
        assert given == [row, start, 0 if dead else count, offset]
        for position in range(start, start + count):
            block = int(machine.blocks[row, position // BLOCK_SIZE])
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            tokens.append((0, 0, -1) if dead else (int(machine.ids[row, position]), position, slot))
        offset += count
        sampled += [(offset - i, row, start + count - i + 1) for i in range(num_samples, 0, -1)]
    tokens += [(0, 0, -1)] * (step.num_tokens - len(tokens))
    assert list(zip(step.ids.tolist(), step.positions.tolist(), step.slots.tolist(), strict=True)) == tokens
    assert step.rows[len(entries) :].tolist() == [PADDING_ROW] * (step.num_entries - len(entries))
    assert not step.counts[len(entries) :].any()
    sampled += [(0, PADDING_ROW, 0)] * (step.num_samples - len(sampled))
    arrays = step.sampled, step.sample_rows, step.num_known
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == sampled


@pytest.mark.parametrize("seed", range(4))
def test_finish_appends_ids_and_ends_rows(seed: int) -> None:
    machine = Machine(seed)
    rows = machine.random.permutation(MAX_ROWS)[:7].tolist()
    machine.params[rows[:4], Field.ENDED] = 0
    machine.params[rows[0], Field.NUM_STOPS] = MAX_STOPS
    entries = [(row, int(machine.params[row, Field.NUM_IDS]) - 1, 1, 1) for row in rows]
    step = machine.step(8, 8, 8)
    machine.send(entries)
    ends.prepare(step, machine.rows, machine.words, machine.stamps, MAX_ROWS, one_each=True)
    sampled_ids = torch.from_numpy(machine.random.integers(0, 1000, 8).astype(np.int32))
    sampled_ids[0] = int(machine.stops[rows[0], 4])
    sampled_ids[1] = -1
    params, ids = machine.params.copy(), machine.ids.copy()
    results = torch.full((RESULT_AT + ends.result_words(8) + 4,), POISON, dtype=torch.int32)
    ends.finish(results, sampled_ids, step, machine.rows, machine.words, machine.stamps)
    result = results[RESULT_AT:]
    given, stopped = result[4:12].tolist(), result[12:20].tolist()
    for i, row in enumerate(rows):
        if params[row, Field.ENDED]:
            assert (given[i], stopped[i]) == (ends.DEAD, 0)
            continue
        token = int(sampled_ids[i])
        stops = token in machine.stops[row, : params[row, Field.NUM_STOPS]]
        assert (given[i], stopped[i]) == (token, int(stops and token >= 0))
        if token >= 0:
            ids[row, params[row, Field.NUM_IDS]] = token
            params[row, Field.NUM_IDS] += 1
        params[row, Field.ENDED] = int(stops or token < 0)
    assert given[7] == ends.DEAD and not stopped[7]
    np.testing.assert_array_equal(machine.params, params)
    np.testing.assert_array_equal(machine.ids, ids)
    assert (results[:RESULT_AT] == POISON).all() and (result[20:] == POISON).all(), "other results are not written"
    assert ends.times_of(result[: ends.STAMP_WORDS].zero_()) == (0, 0)


def test_finish_leaves_the_rows_to_the_host_if_it_verifies() -> None:
    machine = Machine(1)
    row = 3
    machine.params[row, Field.ENDED] = 0
    machine.send([(row, 5, 4, 3), (PADDING_ROW, 0, 1, 1)])
    step = machine.step(8, 4, 8)
    ends.prepare(step, machine.rows, machine.words, machine.stamps, MAX_ROWS, one_each=False)
    before = machine.rows.state.clone()
    results = torch.full((RESULT_AT + ends.result_words(8),), POISON, dtype=torch.int32)
    sampled_ids = torch.tensor([int(machine.stops[row, 0]), 8, -1, 9, 9, 9, 9, 9], dtype=torch.int32)
    ends.finish(results, sampled_ids, step, machine.rows, machine.words, machine.stamps, appends=False)
    result = results[RESULT_AT:]
    assert result[4:12].tolist() == [*sampled_ids[:3].tolist(), *[ends.DEAD] * 5]
    assert not result[12:20].any() and torch.equal(machine.rows.state, before)
