"""One step, from the message to what was sampled: apply its changes, run the program, sample, end rows."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipeline.config.settings import Settings
from pipeline.kernels.draw_inputs import DrawInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, StepInputs
from pipeline.messages import ExecuteFacts, Finish, Sampling, Step
from pipeline.model_folder import ModelConfig
from pipeline.shm.arrays import Array
from pipeline.stages.execute.backend import make_program
from pipeline.stages.execute.kv import divide_swap, plan_kv
from pipeline.stages.execute.models.registry import record_model
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.weights import Weights

Take = Callable[[Array, Any], "np.ndarray[Any, Any]"]
"""Copies an array out of a message: (array, dtype) → one-dimensional."""

Clock = Callable[[], float]

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
NO_LOGPROBS: FloatArray = np.zeros(0, np.float32)

NO_ID = -1
"""What a row that had ended already yields."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled: parallel arrays, one value for each of its entries with `samples` set."""

    rows: IntArray
    generations: "np.ndarray[Any, np.dtype[np.uint32]]"
    ids: IntArray
    finishes: "np.ndarray[Any, np.dtype[np.uint8]]"
    num_rows: int = 0
    """Entries that were computed, those that had ended before left out; likewise"""
    num_tokens: int = 0
    num_copies: int = 0
    copy_s: float = 0.0
    """What the step's copies took."""
    logprobs: FloatArray = field(default_factory=lambda: NO_LOGPROBS)
    """Those of `ids`, 0 for rows that don't ask; empty where none does"""


class Runner:
    """The model, its memory and its rows; `swap` is memory for blocks of swap space. Raises UserError, in the user's
    words, where the model can't be run so."""

    def __init__(self, settings: Settings, model_dir: Path, swap: memoryview | None = None) -> None:
        config = ModelConfig.load(model_dir)
        kv = plan_kv(settings, config)
        max_num_seqs = settings.schedule.max_num_seqs
        swapped = None if swap is None else divide_swap(settings, config, swap)
        num_swap_blocks = 0 if swapped is None else len(swapped)
        self.facts = ExecuteFacts(kv.num_blocks, BLOCK_SIZE, kv.max_model_len, config.vocab_size, num_swap_blocks)
        self.rows = RowTable(max_num_seqs, kv.max_model_len, kv.num_blocks, config.vocab_size)
        self.inputs = StepInputs(
            settings.schedule.max_num_batched_tokens, max_num_seqs, -(-kv.max_model_len // BLOCK_SIZE)
        )
        self.draws = DrawInputs(max_num_seqs)
        num_threads = settings.execute.threads or len(os.sched_getaffinity(0))
        self.program = make_program(settings, config, self.inputs, self.draws, kv, num_threads, swapped)
        dtype: torch.dtype = getattr(torch, settings.execute.dtype)
        weights = Weights(model_dir, config, dtype)
        record_model(config, weights, self.program)
        self.weight_formats = "+".join(weights.taken)
        """As `q8_0+q4_1`."""
        self._eos_ids = config.eos_ids
        self._samplings = msgspec.msgpack.Decoder(Sampling)

    def close(self) -> None:
        """Give back threads and memory."""
        self.program.close()

    def step(self, step: Step, take: Take, clock: Clock = time.monotonic) -> Sampled:
        """Compute one step. Errors of the model or of a wrong plan are not caught: they end the stage. Copies alone are
        timed here, by `clock`."""
        self._change_rows(step, take)
        num_copies, copy_s = self._copy(step, take, clock)
        rows, starts, counts = (take(array, np.int32) for array in (step.rows, step.starts, step.counts))
        samples = take(step.samples, np.uint8).astype(bool)
        assert len(rows) == len(starts) == len(counts) == len(samples)
        running = ~self.rows.ended[rows]
        if running.all() and len(rows):
            ids = self._compute(rows, starts, counts, samples)
        elif running.any():
            ids = self._compute(rows[running], starts[running], counts[running], samples[running])
        else:
            ids = np.empty(0, np.int32)
        sampled = self._result(rows[samples], running[samples], ids)
        num_tokens = int(counts[running].sum())
        return replace(
            sampled, num_rows=int(running.sum()), num_tokens=num_tokens, num_copies=num_copies, copy_s=copy_s
        )

    def _change_rows(self, step: Step, take: Take) -> None:
        self.rows.drop(take(step.drops, np.int32))
        for add in step.adds:
            self.rows.add(
                add.row,
                add.generation,
                add.index,
                take(add.ids, np.int32),
                take(add.blocks, np.int32),
                self._samplings.decode(add.sampling),
                self._eos_ids,
                add.fork_of,
                add.num_prompt,
            )
        self.rows.append_blocks(take(step.block_rows, np.int32), take(step.block_ids, np.int32))

    def _copy(self, step: Step, take: Take, clock: Clock) -> tuple[int, float]:
        """Make the step's copies. Returns how many and the seconds they took; a step without any asks no clock."""
        sources, targets = take(step.copy_sources, np.int32), take(step.copy_targets, np.int32)
        assert len(sources) == len(targets), f"{len(sources)} blocks to copy from, {len(targets)} to copy to"
        if not len(sources):
            return 0, 0.0
        end = self.facts.num_blocks + self.facts.num_swap_blocks
        for blocks in (sources, targets):
            assert blocks.min() >= 0 and blocks.max() < end, f"blocks {blocks} are copied, of {end}"
        assert (sources != targets).all(), f"blocks copied to themselves: {sources[sources == targets]}"
        began = clock()
        self.program.copy_blocks(sources, targets)
        return len(sources), clock() - began

    def _compute(
        self, rows: IntArray, starts: IntArray, counts: IntArray, samples: "np.ndarray[Any, np.dtype[np.bool_]]"
    ) -> IntArray:
        """Run the program over entries that have not ended. Returns the sampled ids, int32."""
        self.rows.begin(rows, starts, counts, samples)
        if len(rows) == int(counts.sum()):
            entry, positions = rows, starts
        else:
            repeated = np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated] + starts[repeated]
            entry = rows[repeated]
        ids = self.rows.ids[entry, positions]
        num_blocks = int(self.rows.num_blocks[rows].max())
        self.inputs.fill(ids, starts, counts, self.rows.blocks[rows, :num_blocks], samples)
        self.rows.fill_draws(self.draws, rows[samples])
        return self.program.run()

    def _result(self, rows: IntArray, running: "np.ndarray[Any, np.dtype[np.bool_]]", sampled: IntArray) -> Sampled:
        """Write ids to their rows, end those that stop, and leave a gap for the rows that had ended before."""
        ids = np.full(len(rows), NO_ID, np.int32)
        finishes = np.full(len(rows), Finish.NONE, np.uint8)
        ids[running] = sampled
        finishes[running] = self.rows.append_ids(rows[running], sampled)
        return Sampled(rows, self.rows.generations[rows], ids, finishes, logprobs=self._logprobs(running, len(sampled)))

    def _logprobs(self, running: "np.ndarray[Any, np.dtype[np.bool_]]", num_drawn: int) -> FloatArray:
        draws = self.draws
        if not (draws.any_scored and num_drawn):
            return NO_LOGPROBS
        logprobs: FloatArray = draws.logprobs[:num_drawn][draws.scored[:num_drawn] != 0]
        return logprobs
