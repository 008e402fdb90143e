"""A step that was launched: what the host knows of it until what came of it is collected."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.kernels.logprob_inputs import ByteArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.cuda.host_transfer import HostTransfer
from pipeline.stages.execute.cuda.staging import Slot

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(slots=True)
class PendingLogprobs:
    """Words of records that are on their way to the host."""

    words: Tensor
    """[M, 1 + 2 * most] int32; see kernels/triton/logprobs.py"""
    num_top: IntArray
    """[M]; -1 has none"""

    def split(self) -> list[ByteArray]:
        """Each one's bytes, as pipeline/runtime/logprob_records.py has them, when they have come; none for those that
        have none."""
        most = (self.words.shape[1] - 1) // 2
        parts = []
        for words, num in zip(self.words.numpy(), self.num_top.tolist(), strict=True):
            kept = np.concatenate((words[: 1 + num], words[1 + most : 1 + most + num])) if num >= 0 else words[:0]
            parts.append(kept.view(np.uint8))
        return parts


@dataclass(slots=True)
class PooledHiddenStates:
    """What an entry's tokens came to, on its way to the host."""

    row: int
    generation: int
    start: int
    hidden_states: Tensor
    place: int
    """Among the samples of the step, -1 where it is none of them."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched and has not been collected."""

    incarnation: int
    step_id: int
    slot: Slot
    num_samples: int
    """With padding."""
    rows: IntArray
    """Of what is sampled, pooled or drawn; likewise"""
    generations: "np.ndarray[Any, np.dtype[np.uint32]]"
    known: IntArray
    """Ids that each row has before this one."""
    pooled: BoolArray | None
    num_rows: int
    num_tokens: int
    is_token_only: bool = False
    """Nobody wished for more than an id."""
    launch_s: float = 0.0
    """The host's time for the launch."""
    host_transfer: HostTransfer | None = None
    """BlockCopier over the bus, if there are any."""
    num_copies: int = 0
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: list[PendingLogprobs] = field(default_factory=list)
    hidden_states: list[PooledHiddenStates] = field(default_factory=list)
    is_collected: bool = False
    """Its slot may be another step's by now."""
    start_ns: int = 0
    """By the GPU's clock, once collected; 0 where nothing was computed or there is no such clock."""
    end_ns: int = 0

    @property
    def is_over(self) -> bool:
        return self.slot.done.query() and (self.host_transfer is None or self.host_transfer.ended.query())

    def wait(self) -> None:
        """Wait for the step, asleep. Of any thread."""
        self.slot.done.synchronize()
        if self.host_transfer is not None:
            self.host_transfer.ended.synchronize()
