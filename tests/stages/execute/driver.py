"""A minimal scheduler: it plans steps for a runner by hand, so that tests choose rows, chunks and cached prefixes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.kernels.attention.kv_layout import LayerKV
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.publishing import Sampled

GREEDY = m.GenerationOptions(temperature=0.0, ignore_eos=True)


def settings(
    *,
    dtype: Any = "float32",
    kernels: Any = "auto",
    kv_mib: int = 16,
    max_num_seqs: int = 8,
    tokens: int = 128,
    max_model_len: int = 0,
    threads: int = 1,
    keep_packed_weights: bool = True,
    kv_dtype: Any = "auto",
    activations: Any = "auto",
    hybrid_kv_cache_manager: bool = False,
) -> Settings:
    """Without `hybrid_kv_cache_manager`, a row has one block table: this file's steps have no others."""
    return Settings(
        max_model_len=max_model_len,
        execute=ExecuteSettings(
            dtype=dtype,
            kernels=kernels,
            kv_dtype=kv_dtype,
            activations=activations,
            hybrid_kv_cache_manager=hybrid_kv_cache_manager,
            kv_cache_bytes=kv_mib * 1024**2,
            num_threads=threads,
            keep_packed_weights=keep_packed_weights,
        ),
        schedule=ScheduleSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens),
    )


def take(array: m.Array, dtype: Any) -> np.ndarray:
    assert isinstance(array, bytes)
    return np.frombuffer(array, dtype).copy()


def i32(values: Any) -> bytes:
    return np.asarray(list(values), np.int32).tobytes()


def row_add(
    row: int,
    ids: list[int],
    blocks: list[int],
    options: m.GenerationOptions = GREEDY,
    *,
    index: int = 0,
    generation: int = 1,
    fork_of: int = -1,
    num_prompt: int | None = None,
    grids: Sequence[Sequence[int]] = (),
) -> m.RowAdd:
    return m.RowAdd(
        row=row,
        generation=generation,
        index=index,
        ids=i32(ids),
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        blocks=i32(blocks),
        options=msgspec.Raw(msgspec.msgpack.encode(options)),
        fork_of=fork_of,
        grids=[list(grid) for grid in grids],
    )


def make_step(
    entries: list[tuple[int, int, int, bool]] = (),  # type: ignore[assignment]
    *,
    adds: list[m.RowAdd] = (),  # type: ignore[assignment]
    drops: list[int] = (),  # type: ignore[assignment]
    blocks: list[tuple[int, int]] = (),  # type: ignore[assignment]
    copies: list[tuple[int, int]] = (),  # type: ignore[assignment]
    states: list[tuple[int, int]] = (),  # type: ignore[assignment]
    state_copies: list[tuple[int, int]] = (),  # type: ignore[assignment]
    step_id: int = 0,
) -> m.Step:
    """`entries` are (row, start, count, samples), `blocks` (row, block) pairs to append, `copies` and `state_copies`
    (source, target) pairs, `states` the slots that the entries read and write."""
    return m.Step(
        incarnation=1,
        step_id=step_id,
        drops=i32(drops),
        adds=list(adds),
        block_rows=i32(row for row, _ in blocks),
        block_ids=i32(block for _, block in blocks),
        rows=i32(entry[0] for entry in entries),
        starts=i32(entry[1] for entry in entries),
        counts=i32(entry[2] for entry in entries),
        samples=np.asarray([entry[3] for entry in entries], np.uint8).tobytes(),
        copy_sources=i32(source for source, _ in copies),
        copy_targets=i32(target for _, target in copies),
        state_reads=i32(read for read, _ in states),
        state_writes=i32(write for _, write in states),
        state_copy_sources=i32(source for source, _ in state_copies),
        state_copy_targets=i32(target for _, target in state_copies),
    )


class GivenMasks:
    """Replaces `Runner.masks`: a test writes `words` itself, and then 1 into `word`."""

    ticket = 1

    def __init__(self, runner: CpuRunner) -> None:
        self._own = runner.masks
        self.words = runner.sampling_inputs.mask_words
        self.word = np.zeros(1, np.uint32)
        self.word_address = int(self.word.ctypes.data)
        self.failed: dict[int, str] = {}
        """By place"""

    def add(self, row: int, options: m.GenerationOptions, num_prompt: int) -> None:
        pass

    def drop(self, rows: Any) -> None:
        pass

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> None:
        pass

    def wait(self) -> None:
        """The program has polled for a while; it polls again."""

    def take_failed(self) -> dict[int, str]:
        return self.failed

    def close(self) -> None:
        self._own.close()


class Driver:
    """Plans for one runner: rows and blocks are allocated in order and freed by `clear`."""

    def __init__(self, model_dir: str | Path, config: Settings, swap_bytes: int = 0) -> None:
        self.runner = CpuRunner(config, Path(model_dir), memoryview(bytearray(swap_bytes)) if swap_bytes else None)
        self.runner.program.keep_logits()
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        taken = np.flatnonzero(self.runner.rows.taken).tolist()
        if taken:
            self.step(drops=taken)
        self._next_block = 0
        self._next_row = 0

    @property
    def layers(self) -> list[LayerKV]:
        """The runner's KV memory."""
        assert isinstance(self.runner.program, TorchProgram)
        return self.runner.program.kv

    def make_step(self, entries: Any = (), **kwargs: Any) -> m.Step:
        """By default, the state of a row is in the slot with its number."""
        if self.runner.facts.num_state_slots and "states" not in kwargs:
            kwargs["states"] = [(row if start else -1, row) for row, start, *_ in entries]
        return make_step(entries, **kwargs)

    def step(self, entries: Any = (), **kwargs: Any) -> Sampled:
        return self.runner.step(self.make_step(entries, **kwargs), take)

    def logits(self) -> np.ndarray:
        """The logits of the last step: [samples, vocab_size]."""
        return self.runner.program.logits().copy()

    def take_blocks(self, num_tokens: int) -> list[int]:
        num = -(-num_tokens // BLOCK_SIZE)
        self._next_block += num
        assert self._next_block <= self.runner.facts.num_blocks
        return list(range(self._next_block - num, self._next_block))

    def take_row(self) -> int:
        self._next_row += 1
        return self._next_row - 1

    def generate(
        self,
        prompts: list[list[int]],
        num: int,
        *,
        chunk: int | list[int | None] | None = None,
        shared: list[list[int]] | None = None,
        cached: list[int] | None = None,
        options: m.GenerationOptions = GREEDY,
    ) -> list[list[int]]:
        """`num` ids for each prompt, all rows in one batch. `chunk` limits the tokens of a prompt per step, for all of
        them or for each; `shared[i]` are blocks that already hold the first `cached[i]` ids of prompt i."""
        rows = [self.take_row() for _ in prompts]
        known = [list(prompt) for prompt in prompts]
        computed = list(cached or [0] * len(prompts))
        chunks = chunk if isinstance(chunk, list) else [chunk] * len(prompts)
        adds = []
        for i, prompt in enumerate(prompts):
            blocks = list(shared[i]) if shared else []
            blocks += self.take_blocks(len(prompt) + num - len(blocks) * BLOCK_SIZE)
            adds.append(row_add(rows[i], prompt, blocks, options))
        while not all(len(ids) == len(prompt) + num for ids, prompt in zip(known, prompts, strict=True)):
            entries, left = [], self._budget
            for i, row in enumerate(rows):
                count = min(len(known[i]) - computed[i], chunks[i] or left, left)
                if count and len(known[i]) < len(prompts[i]) + num:
                    entries.append((row, computed[i], count, computed[i] + count == len(known[i])))
                    computed[i] += count
                    left -= count
            result = self.step(entries, adds=adds)
            adds = []
            for row, token in zip(result.rows.tolist(), result.ids.tolist(), strict=True):
                known[rows.index(row)].append(token)
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]
