"""Runs a random plan of steps twice, one step at a time and several in flight, and compares the results bit by bit.

The plan has what a scheduler does: prompts in chunks, decoding, stop ids, forks with a copy of a partial block, rows
that are dropped and replaced while steps that compute them are in flight, blocks that go to swap space and return, and
rows whose sampling needs launches of its own. It does not depend on the sampled ids, so both runs send the same steps.
With several steps in flight, a write that overtakes a read changes an id.
"""

import mmap
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE, block_bytes
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.measuring import planned as steps
from pipeline.stages.execute.publishing import Sampled
from tools.gpu_check.child import Context
from tools.gpu_check.models import write_prepared
from tools.gpu_check.readings import Reading
from tools.gpu_check.runners import close, settings_for
from tools.gpu_check.shapes import SMALL, TINY

NUM_ROWS = 12
NUM_BLOCKS = 150
NUM_SWAP_BLOCKS = 60
MAX_TOKENS = 96
"""Token budget of a step."""
DEPTH = 4
PLAIN, FILTERED, STOPPING, PROCESSED, RECORDED, MASKED = range(6)
WEIGHTS = (4, 1, 4, 1, 1, 1)
"""How often each kind of row is added."""


@dataclass(slots=True)
class _Row:
    """A sequence in the plan."""

    ids: list[int]
    options: m.GenerationOptions
    blocks: list[int]
    length: int
    """Ids when it ends."""
    known: int
    """Prompt ids, and ids that have been sampled."""
    computed: int = 0


class RandomPlan:
    """Step messages of a random schedule."""

    def __init__(self, seed: int, vocab_size: int, *, max_prompt: int, max_output: int) -> None:
        self._chance = random.Random(seed)
        self._vocab_size, self._max_prompt, self._max_output = vocab_size, max_prompt, max_output
        self._rows: dict[int, _Row] = {}
        self._swapped: list[tuple[_Row, list[int]]] = []
        self._free = list(range(NUM_BLOCKS))
        self._free_slots = list(range(NUM_BLOCKS, NUM_BLOCKS + NUM_SWAP_BLOCKS))
        self._generation = 0
        self.done = dict.fromkeys(("adds", "forks", "out", "in"), 0)

    def step(self) -> m.Step:
        """The next step."""
        chance = self._chance
        drops, adds, copies = self._drops(), list[m.RowAdd](), list[tuple[int, int]]()
        for row, old in drops.items():
            self._free += old.blocks
            if old.computed < len(old.ids) and chance.random() < 0.8:
                self._swap_out(old, copies)
            del self._rows[row]
        for row in range(NUM_ROWS):
            if row not in self._rows and chance.random() < 0.5:
                self._fill(row, adds, copies)
        entries = self._entries()
        message = steps.step(entries, adds, list(drops))
        sources, targets = zip(*copies, strict=True) if copies else ((), ())
        return msgspec.structs.replace(message, copy_sources=steps.i32(sources), copy_targets=steps.i32(targets))

    def _drops(self) -> dict[int, _Row]:
        """Sequences that end, and some others, often in the middle of a prompt."""
        return {
            row: it
            for row, it in self._rows.items()
            if it.known >= it.length or self._chance.random() < (0.2 if 0 < it.computed < len(it.ids) else 0.04)
        }

    def _swap_out(self, row: _Row, copies: list[tuple[int, int]]) -> None:
        """The blocks of a sequence that was dropped in the middle of its prompt go to swap space, if there is room."""
        num = steps.num_blocks(row.computed)
        if num and num <= len(self._free_slots):
            slots = [self._free_slots.pop() for _ in range(num)]
            copies += zip(row.blocks[:num], slots, strict=True)
            self._swapped.append((row, slots))
            self.done["out"] += 1

    def _fill(self, row: int, adds: list[m.RowAdd], copies: list[tuple[int, int]]) -> None:
        """Give a free row to a sequence from swap space, to a fork, or to a new one."""
        taken = {target for _, target in copies}
        if self._swapped and not taken & set(self._swapped[0][1]) and self._chance.random() < 0.5:
            back, slots = self._swapped[0]
            if (blocks := self._blocks(steps.num_blocks(back.length))) is None:
                return
            del self._swapped[0]
            copies += zip(slots, blocks[: len(slots)], strict=True)
            # The slots are free from the next step on.
            self._free_slots[:0] = slots
            self._add(row, _Row(back.ids, back.options, blocks, back.length, back.known, back.computed), adds)
            self.done["in"] += 1
            return
        sources = [(at, it) for at, it in self._rows.items() if it.computed >= len(it.ids)]
        if sources and self._chance.random() < 0.3:
            self._fork(row, *self._chance.choice(sources), adds, copies)
            return
        ids = [self._chance.randrange(3, self._vocab_size) for _ in range(self._chance.randint(1, self._max_prompt))]
        length = len(ids) + self._chance.randint(1, self._max_output)
        if (blocks := self._blocks(steps.num_blocks(length))) is not None:
            self._add(row, _Row(ids, self._options(), blocks, length, len(ids)), adds)

    def _fork(
        self, row: int, source_row: int, source: _Row, adds: list[m.RowAdd], copies: list[tuple[int, int]]
    ) -> None:
        """Another sequence of a request: it shares the prompt's blocks by copies, and computes the last id again."""
        if source.options.compiled_grammar:
            return
        length = len(source.ids) + self._chance.randint(1, self._max_output)
        if (blocks := self._blocks(steps.num_blocks(length))) is None:
            return
        num = steps.num_blocks(len(source.ids))
        copies += zip(source.blocks[:num], blocks[:num], strict=True)
        forked = _Row(source.ids, source.options, blocks, length, len(source.ids), len(source.ids) - 1)
        self._add(row, forked, adds, fork_of=source_row)
        self.done["forks"] += 1

    def _add(self, row: int, it: _Row, adds: list[m.RowAdd], fork_of: int = -1) -> None:
        self._generation += 1
        message = steps.row_add(row, it.ids, it.blocks, it.options)
        ids = message.ids if fork_of < 0 else b""
        adds.append(
            msgspec.structs.replace(
                message, generation=self._generation, ids=ids, fork_of=fork_of, index=self._generation % 7
            )
        )
        self._rows[row] = it
        self.done["adds"] += 1

    def _blocks(self, num: int) -> list[int] | None:
        if num > len(self._free):
            return None
        self._chance.shuffle(self._free)
        return [self._free.pop() for _ in range(num)]

    def _options(self) -> m.GenerationOptions:
        chance, vocab_size = self._chance, self._vocab_size
        kind = chance.choices(range(len(WEIGHTS)), WEIGHTS)[0]
        plain = m.GenerationOptions(temperature=chance.choice((0.0, 1.0)), seed=chance.randrange(99), ignore_eos=True)
        replace = msgspec.structs.replace
        if kind == FILTERED:
            return replace(plain, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
        if kind == STOPPING:
            num = min(48, vocab_size // 8)
            return replace(plain, stop_token_ids=sorted(chance.sample(range(3, vocab_size), num)))
        if kind == PROCESSED:
            return replace(plain, repetition_penalty=1.2, bias_ids=[7], bias_values=[2.0], bad_words_ids=[[9], [5, 6]])
        if kind == RECORDED:
            return replace(plain, num_logprobs=3)
        if kind == MASKED:
            return replace(plain, compiled_grammar="of FakeMasks")
        return plain

    def _entries(self) -> list[steps.Entry]:
        left = MAX_TOKENS
        entries: list[steps.Entry] = []
        for row in self._chance.sample(sorted(self._rows), len(self._rows)):
            it = self._rows[row]
            num = it.known - it.computed
            if not left or it.known >= it.length or self._chance.random() < 0.1:
                continue
            count = min(num, left, self._chance.choice((num, num, 7, 33)))
            ends = it.computed + count == it.known
            entries.append((row, it.computed, count, ends))
            it.computed += count
            it.known += ends
            left -= count
        return entries


class FakeMasks:
    """Replaces a runner's masks: the mask of a row depends on its last id. So a mask that was made too early shows."""

    forces = False

    def __init__(self, words: "np.ndarray[Any, np.dtype[np.uint32]]") -> None:
        self.words = np.zeros_like(words)
        self._rows: set[int] = set()

    def add(self, row: int, options: m.GenerationOptions, num_prompt: int) -> None:
        self._rows.add(row)

    def drop(self, rows: Any) -> None:
        self._rows -= set(rows.tolist())

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        indices = [index for index, row in enumerate(rows.tolist()) if row in self._rows]
        for index in indices:
            last = int(ids[rows[index], num_ids[rows[index]] - 1])
            self.words[index] = np.random.default_rng(last).integers(1, 2**32 - 1, self.words.shape[1], np.uint32)
        return np.array(indices, np.int64)

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def take_failed(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        pass


def compare(context: Context, *, early: bool) -> Iterator[Reading]:
    """Run plans one step at a time, and `DEPTH` steps in flight, in one executor."""
    dtype = "float32" if context.interpreted else "bfloat16"
    what = f"{DEPTH} steps in flight{', early launches' * early}, {dtype}"
    num_steps, num_plans = (5, 1) if context.interpreted else (250, 2 if context.small else 6)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        config = write_prepared(Path(name), TINY if context.interpreted else SMALL, seed=12)
        runner = _make(Path(name), config, dtype, early=early)
        try:
            for seed in range(num_plans):
                yield _same(f"{what}, plan {seed}", runner, config, seed, num_steps, context)
        finally:
            close(runner)


def _same(case: str, runner: Any, config: ModelConfig, seed: int, num_steps: int, context: Context) -> Reading:
    lengths = {"max_prompt": 20, "max_output": 4} if context.interpreted else {"max_prompt": 120, "max_output": 40}
    plan = RandomPlan(seed, config.vocab_size, **lengths)
    messages = [plan.step() for _ in range(num_steps)]
    alone, together, again = (_run(runner, messages, depth) for depth in (1, DEPTH, DEPTH))
    unequal = [i for i, pair in enumerate(zip(alone, together, again, strict=True)) if not _all_equal(pair)]
    num_ids = sum(len(sampled.ids) for sampled in alone)
    done = ", ".join(f"{num} {kind}" for kind, num in plan.done.items())
    note = f"{num_steps} steps, {num_ids} ids; {done}"
    if unequal:
        note = f"{len(unequal)} steps differ, the first is {unequal[0]}; {note}"
    return Reading(case, result="FAIL" if unequal else "pass", note=note)


def _all_equal(results: Sequence[Sampled]) -> bool:
    first = results[0]
    return all(
        np.array_equal(first.rows, each.rows)
        and np.array_equal(first.ids, each.ids)
        and np.array_equal(first.finishes, each.finishes)
        and bytes(first.token_outputs) == bytes(each.token_outputs)
        for each in results[1:]
    )


def _run(runner: Any, messages: Sequence[m.Step], depth: int) -> list[Sampled]:
    """The results of the steps, `depth` of which are in flight. They begin with no rows and end so."""
    found: list[Sampled] = []
    runner.publish = lambda launched_step, sampled: found.append(sampled)
    for message in messages:
        while len(runner.launched_steps) >= depth:
            runner.collect()
        runner.launch(message, steps.take)
    runner.drain()
    runner.drop_all()
    return found


def _make(folder: Path, config: ModelConfig, dtype: str, *, early: bool) -> Any:
    """An executor with swap space in shared memory, as in a server."""
    from pipeline.stages.execute.cuda.runner import CudaRunner

    num_bytes = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, 2 if dtype == "bfloat16" else 4)
    settings: Settings = settings_for(
        "cuda",
        dtype=dtype,
        max_model_len=BLOCK_SIZE * (NUM_BLOCKS // NUM_ROWS),
        kv_cache_bytes=max(NUM_BLOCKS * num_bytes, 1024**2),
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=MAX_TOKENS,
        early_launch=early,
    )
    size = NUM_SWAP_BLOCKS * num_bytes
    fd = os.memfd_create("gpu-check-swap")
    os.ftruncate(fd, size)
    swap = memoryview(mmap.mmap(fd, size))
    os.close(fd)
    runner = CudaRunner(settings, folder, swap=swap)
    masks: Any = FakeMasks(runner.masks.words)
    runner.masks.close()
    runner.masks = runner._changes._masks = masks
    return runner
