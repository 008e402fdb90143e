"""A launched step: what the host keeps until its result is collected."""

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.kernels.sampling.logprob_inputs import ByteArray
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.host_transfer import HostTransfer
from pipeline.stages.execute.cuda.model.device_model import HiddenStates
from pipeline.stages.execute.cuda.rows.batches import Batch, BoolArray
from pipeline.stages.execute.cuda.rows.staging import Slot


@dataclass(slots=True)
class PendingLogprobs:
    """Logprobs that are being copied to the host."""

    words: Tensor
    """[M, 1 + 2 * most] int32; see kernels/triton/sampling/logprobs.py"""
    num_top: IntArray
    """[M]; -1 for no logprobs"""

    def split(self) -> list[ByteArray]:
        """The bytes of each, in the format of pipeline/runtime/token_outputs.py; empty for rows without logprobs.
        The copy must be complete."""
        most = (self.words.shape[1] - 1) // 2
        parts = []
        for words, num in zip(self.words.numpy(), self.num_top.tolist(), strict=True):
            kept = np.concatenate((words[: 1 + num], words[1 + most : 1 + most + num])) if num >= 0 else words[:0]
            parts.append(kept.view(np.uint8))
        return parts


@dataclass(slots=True)
class PooledHiddenStates:
    """Hidden states of an entry's tokens that are being copied to the host."""

    row: int
    generation: int
    start: int
    hidden_states: Tensor
    index: int
    """Index among the samples of the step; -1 if the entry samples nothing."""


@dataclass(slots=True)
class ProposerStates:
    """What a proposer gets of a step: the hidden states of its entries' tokens. One value per entry; `counts` do not
    include proposed ids, which follow an entry's tokens."""

    rows: IntArray
    generations: "np.ndarray[Any, np.dtype[np.uint32]]"
    starts: IntArray
    counts: IntArray
    offsets: IntArray
    samples: BoolArray
    states: Tensor
    """[T, width] float32"""


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched and has not been collected."""

    incarnation: int
    step_id: int
    slot: Slot
    num_samples: int
    """Including padding."""
    rows: IntArray
    """Of each sample, pooled or sampled; parallel to the arrays below"""
    generations: "np.ndarray[Any, np.dtype[np.uint32]]"
    known: IntArray
    """Number of ids of each row before this step's id."""
    pooled: BoolArray | None
    num_rows: int
    num_tokens: int
    num_drafts: LongArray | None = None
    """Of `rows`: ids that were proposed for them. None if there are none: then the GPU appends what it samples."""
    draft_s: float = 0.0
    """Time of a draft model, before the launch."""
    draft_pass_s: float = 0.0
    """Of one of its passes."""
    is_token_only: bool = False
    """No row requests more than the next id."""
    launch_s: float = 0.0
    """The host's time for the launch."""
    host_transfer: HostTransfer | None = None
    """The copies over the bus, if there are any."""
    num_copies: int = 0
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: list[PendingLogprobs] = field(default_factory=list)
    hidden_states: list[PooledHiddenStates] = field(default_factory=list)
    proposer_states: ProposerStates | None = None
    is_collected: bool = False
    """Its slot may be in use by another step."""
    start_ns: int = 0
    """By the GPU's clock, once collected; 0 if nothing was computed or there is no GPU."""
    end_ns: int = 0

    @property
    def is_over(self) -> bool:
        return self.slot.done.query() and (self.host_transfer is None or self.host_transfer.ended.query())

    def wait(self, spin_s: float = 0.0) -> None:
        """Block until the step is complete, for the first `spin_s` without sleeping. Any thread may call it."""
        end_s = time.monotonic() + spin_s
        while spin_s and not self.is_over and time.monotonic() < end_s:
            os.sched_yield()
        self.slot.done.synchronize()
        if self.host_transfer is not None:
            self.host_transfer.ended.synchronize()


def pooled_entries(
    launched_step: LaunchedStep,
    device: Device,
    batch: Batch,
    generations: "np.ndarray[Any, np.dtype[np.uint32]]",
    pooled: BoolArray,
    hidden_states: HiddenStates,
) -> list[PooledHiddenStates]:
    """Enqueue the copies of the hidden states of `pooled` entries to the host. `generations` are those of all rows."""
    entries = []
    for i in np.flatnonzero(pooled).tolist():
        row, begin = int(batch.rows[i]), int(batch.offsets[i])
        tokens = device.fetch(hidden_states.of(begin, begin + int(batch.counts[i])))
        index = np.flatnonzero(launched_step.rows == row).tolist()
        start, generation = int(batch.starts[i]), int(generations[row])
        entries.append(PooledHiddenStates(row, generation, start, tokens, index[0] if index else -1))
    return entries
