"""Requests and their sequences, as the scheduler keeps them."""

import msgspec
import numpy as np
from msgspec import Raw

from pipeline.messages import FirstTimes
from pipeline.stages.schedule import prefix
from pipeline.stages.schedule.arrays import Float32s, Ids
from pipeline.stages.schedule.swap import Swapped

Order = tuple[int, float, int]
"""Rank, arrival and number: a sequence's place among all."""

NO_ROW = -1
NO_LOGPROBS: Float32s = np.zeros(0, np.float32)


class Request(msgspec.Struct, eq=False):
    """One prompt, for which `n` sequences are generated."""

    request_id: int
    attempt: int
    gateway: int
    arrival_s: float
    prompt: Ids
    n: int
    max_tokens: int
    sampling: Raw
    text: Raw
    open_sequences: dict[int, "Sequence"] = {}
    """By index: those without a closing. A request whose last sequence closes stays as a log until `Closed`."""
    queued_s: float = 0.0
    """When it was taken in, by time.monotonic(); as below."""
    priority: int = 0
    root: bytes = prefix.ROOT
    """What its prefix keys begin with."""
    keys: list[bytes] = []
    """Those of its prompt's full blocks, where siblings share them."""
    with_logprobs: bool = False
    """The executor tells the log probabilities of its ids."""


class Sequence(msgspec.Struct, eq=False):
    """One sample of a request. While it runs, its ids are in its row; else they are here. Never in both."""

    seq: int
    request: Request
    index: int
    ids: Ids
    """int32, every settled id: the prompt, then outputs"""
    limit: int
    """Ids at which it ends by length."""
    order: Order
    """Its place among all sequences: who is first goes first, and is preempted last."""
    row: int = NO_ROW
    keys: list[bytes] = []
    """Prefix keys of its full blocks, as far as they were needed."""
    swapped: Swapped | None = None
    """Where its keys and values are while it waits, if they were kept."""
    num_preemptions: int = 0
    waits_long: bool = False
    """Whether it waits among those with many ids."""
    num_passed: int = 0
    """How often a later one started before it, while it waited."""
    started_s: float = 0.0
    """When its first step was planned; 0 before."""
    first_s: float = 0.0
    """When its first output id was settled; 0 before."""
    num_given: int = 0
    """Ids it came with: its prompt, and outputs that the client had already."""
    logprobs: Float32s = NO_LOGPROBS
    """Parallel to `ids`, where the request has them: 0 for ids it came with. Like them in its row while it runs."""
    num_cached: int = 0
    """Ids that it found in the prefix cache when it first started."""

    @property
    def first_times(self) -> FirstTimes:
        """Their place is set when they are sent."""
        return FirstTimes(0, self.request.queued_s, self.started_s, self.first_s, self.num_cached)
