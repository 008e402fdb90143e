"""Checks the kernels at the start and the end of a step, and block copies. They move integers, so results must be
equal.

Shapes: R rows, L ids of a row, B blocks of a row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton import step as ends
from pipeline.kernels.triton.copy import fork, gather, scatter
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.kernels.triton.rows import NUM_FIELDS, Field, RowState, StepArrays
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels.checking import check_exact
from tools.gpu_check.readings import Reading

MAX_STOPS = 5
VOCAB = 1000
NO_ID = -1
RESULT_AT = 32
"""Offset of the step's result among others."""
Ints = np.ndarray[Any, np.dtype[np.int32]]


def items(context: Context) -> list[Item]:
    return [Item("ends of a step", _ends), Item("copies of blocks", _copies)]


class DeviceRows:
    """Rows with random contents, on the device as in an executor, and the same on the host."""

    def __init__(self, num_rows: int, num_ids: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.num_rows, total, num_blocks = num_rows, num_rows + 1, -(-num_ids // BLOCK_SIZE)
        self.params: Ints = np.zeros((total, NUM_FIELDS), np.int32)
        self.ids: Ints = self.random.integers(0, VOCAB, (total, num_ids), np.int32)
        self.blocks: Ints = self.random.permutation(total * num_blocks).reshape(total, -1).astype(np.int32)
        self.stops: Ints = self.random.integers(0, VOCAB // 20, (total, MAX_STOPS), np.int32)
        self.params[:, Field.NUM_IDS] = self.random.integers(1, num_ids - 1, total)
        self.params[:, Field.NUM_STOPS] = self.random.integers(0, MAX_STOPS + 1, total)
        self.params[:, Field.ENDED] = self.random.random(total) < 0.2
        self.params[-1, Field.ENDED] = 1
        arrays = [self.params, self.ids, self.blocks, self.stops]
        self.state = _send(np.concatenate([array.ravel() for array in arrays]))
        views, begin = [], 0
        for array in arrays:
            views.append(self.state[begin : begin + array.size].view(array.shape))
            begin += array.size
        self.rows = RowState(self.state, *views)

    def words(self, starts: Ints, counts: Ints, rows: Ints, sampled: Ints) -> Tensor:
        """A step's words as `Staging` writes them. Unused words hold garbage."""
        most, num_tokens = self.num_rows, int(counts.sum())
        at = ends.words_of(most, most)
        words = np.full(at + num_tokens, 10**8, np.int32)
        head = {"NUM_TOKENS": num_tokens, "NUM_ENTRIES": len(rows), "NUM_SAMPLES": len(sampled), "NUM_RUNS": 0}
        for name, number in {**head, "RUNS_AT": at, "TOKENS_AT": at, "RESULT_AT": RESULT_AT}.items():
            words[ends.Head[name]] = number
        offsets = np.cumsum(counts) - counts
        tokens = (offsets + counts - 1)[sampled]
        for i, array in enumerate((rows, starts, counts, offsets, tokens)):
            words[ends.HEADER + i * most :][: len(array)] = array
        words[at:] = np.repeat(np.arange(len(rows)), counts)
        return _send(words)

    def arrays(self, num_tokens: int, num_entries: int, num_samples: int) -> StepArrays:
        def ints(num: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num,), 10**8, dtype=dtype, device=gpu.device())

        return StepArrays(
            rows=ints(num_entries),
            starts=ints(num_entries),
            counts=ints(num_entries),
            offsets=ints(num_entries),
            ids=ints(num_tokens),
            positions=ints(num_tokens),
            slots=ints(num_tokens, torch.int64),
            sampled=ints(num_samples),
            sample_rows=ints(num_samples),
            num_known=ints(num_samples),
            blocks=self.rows.blocks,
        )


def _send(array: "np.ndarray[Any, Any]") -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(gpu.device())


def _ends(context: Context) -> Iterator[Reading]:
    sizes = ((4, 40, 3),) if context.interpreted else ((256, 1100, 256), (256, 1100, 40), (16, 300, 1))
    for i, (num_rows, num_ids, num_entries) in enumerate(sizes):
        for one_each in (True, False):
            device_rows = DeviceRows(num_rows, num_ids, seed=2 * i + one_each)
            random = device_rows.random
            rows = random.permutation(num_rows)[:num_entries].astype(np.int32)
            known = device_rows.params[rows, Field.NUM_IDS]
            counts = np.ones_like(rows) if one_each else np.minimum(random.integers(1, 30, num_entries), known)
            starts = (known - counts).astype(np.int32)
            sampled = np.flatnonzero(random.random(num_entries) < (2 if one_each else 0.6)).astype(np.int32)
            case = f"{num_entries} of {num_rows} rows, {'one token' if one_each else 'chunks'} each"
            yield from _check_step(device_rows, rows, starts, counts.astype(np.int32), sampled, one_each, case)


def _check_step(
    device_rows: DeviceRows, rows: Ints, starts: Ints, counts: Ints, sampled: Ints, one_each: bool, case: str
) -> Iterator[Reading]:
    num_tokens, num = int(counts.sum()), device_rows.num_rows
    # All sizes of a decode step are padded alike.
    step = device_rows.arrays(num if one_each else num_tokens + 7, num, num)
    words = device_rows.words(starts, counts, rows, sampled)
    stamps = torch.zeros(ends.STAMP_WORDS, dtype=torch.int32, device=gpu.device())
    ends.prepare(step, device_rows.rows, words, stamps, num, one_each)

    dead = device_rows.params[rows, Field.ENDED] == 1
    entry = np.repeat(np.arange(len(rows)), counts)
    position = np.arange(num_tokens) - (np.cumsum(counts) - counts)[entry] + starts[entry]
    lives = ~dead[entry]
    ids = np.where(lives, device_rows.ids[rows[entry], position], 0)
    slots = (
        device_rows.blocks[rows[entry], position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    )
    expected = {
        "rows": (step.rows, rows, num),
        "starts": (step.starts, starts, 0),
        "counts": (step.counts, np.where(dead, 0, counts), 0),
        "ids": (step.ids, ids, 0),
        "positions": (step.positions, np.where(lives, position, 0), 0),
        "slots": (step.slots, np.where(lives, slots, -1), -1),
        "sample rows": (step.sample_rows, rows[sampled], num),
        "samples": (step.sampled, (np.cumsum(counts) - 1)[sampled], 0),
        "known ids": (step.num_known, (starts + counts)[sampled], 0),
    }
    wrong = [name for name, (found, right, padding) in expected.items() if not _is(found, right, padding)]
    yield check_exact(f"a step's batch, {case}", not wrong, f"wrong: {', '.join(wrong)}" if wrong else "")

    drawn = device_rows.random.integers(0, VOCAB // 10, num).astype(np.int32)
    drawn[device_rows.random.random(num) < 0.1] = NO_ID
    # In host memory, as in a server.
    results = gpu.pinned(RESULT_AT + ends.result_words(num), torch.int32).fill_(10**8)
    ends.finish(results, _send(drawn), step, device_rows.rows, words, stamps)
    gpu.synchronize()
    yield check_exact(f"no other result is written, {case}", bool((results[:RESULT_AT] == 10**8).all()))
    result = results[RESULT_AT:]
    tokens, stops = np.full(len(sampled), ends.DEAD, np.int32), np.zeros(len(sampled), np.int32)
    for i, row in enumerate(rows[sampled].tolist()):
        if device_rows.params[row, Field.ENDED]:
            continue
        tokens[i] = token = drawn[i]
        if token >= 0:
            device_rows.ids[row, device_rows.params[row, Field.NUM_IDS]] = token
            device_rows.params[row, Field.NUM_IDS] += 1
            stops[i] = token in device_rows.stops[row, : device_rows.params[row, Field.NUM_STOPS]]
        device_rows.params[row, Field.ENDED] = int(token < 0 or stops[i])
    begin = ends.STAMP_WORDS
    right = _is(result[begin : begin + num], tokens, ends.DEAD) and _is(result[begin + num :], stops, 0)
    yield check_exact(f"sampled ids in the result, {case}", right)
    arrays = (device_rows.params, device_rows.ids, device_rows.blocks, device_rows.stops)
    state = np.concatenate([array.ravel() for array in arrays])
    yield check_exact(f"sampled ids in the rows, {case}", _is(device_rows.state, state, 0))
    if not INTERPRETED:
        began_ns, ended_ns = ends.times_of(result.cpu())
        yield check_exact(f"stamps, {case}", 0 < ended_ns - began_ns < 10**9, f"{(ended_ns - began_ns) / 1e3:.0f} µs")


def _is(found: Tensor, right: "np.ndarray[Any, Any]", padding: int) -> bool:
    """Whether a tensor begins with `right` and continues with `padding`."""
    numbers = found.cpu().numpy()
    return bool((numbers[: len(right)] == right).all() and (numbers[len(right) :] == padding).all())


def _copies(context: Context) -> Iterator[Reading]:
    pieces, num_blocks, words, num = (4, 6, 64, 2) if context.interpreted else (64, 400, 8 * BLOCK_SIZE * 128 // 2, 60)
    generator = torch.Generator(gpu.device()).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, device=gpu.device(), dtype=torch.int32)

    memory, packed = random(pieces, num_blocks, words), random(num, pieces, words)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).to(gpu.device(), torch.int32)
    sources, targets = order[:num], order[num : 2 * num]
    out = torch.empty_like(packed)
    gather(out, memory, sources)
    yield check_exact("blocks gathered", torch.equal(out, memory[:, sources.long()].transpose(0, 1)))
    right = memory.clone()
    right[:, targets.long()] = packed.transpose(0, 1)
    scatter(memory, targets, packed)
    yield check_exact("blocks scattered", torch.equal(memory, right))
    right[:, targets.long()] = right[:, sources.long()]
    fork(memory, targets, sources)
    yield check_exact("blocks forked", torch.equal(memory, right))
