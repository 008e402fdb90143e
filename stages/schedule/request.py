"""Requests and their sequences, as the scheduler keeps them."""

import msgspec
from msgspec import Raw

from pipeline.runtime.messages import FirstTimes
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.swap import Swapped

Order = tuple[int, float, int]
"""Rank, arrival and number: a sequence's place among all."""

NO_ROW = -1


class PromptRequest(msgspec.Struct, eq=False):
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
    record_bytes: int = 0
    """Bytes of what the executor tells of each output id besides; 0 is nothing."""
    prompt_record_bytes: int = 0
    """Likewise of the prompt's, all but the first, by its first sequence"""
    num_prompt_records: int = 0
    """Of those, how many have come."""
    needs_full_prefill: bool = False
    """Each position of the prompt is computed, by each sequence and in one go."""


class Sequence(msgspec.Struct, eq=False):
    """One sample of a request. While it runs, its ids are in its row; else they are here. Never in both."""

    seq: int
    request: PromptRequest
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
    is_long: bool = False
    """Whether it waits among those with many ids."""
    num_skipped: int = 0
    """How often a later one started before it, while it waited."""
    started_s: float = 0.0
    """When its first step was planned; 0 before."""
    first_s: float = 0.0
    """When its first output id was settled; 0 before."""
    num_given: int = 0
    """Ids it came with: its prompt, and outputs that the client had already."""
    records: bytearray = msgspec.field(default_factory=bytearray)
    """Of the settled ids that have not been reported yet"""
    error: str = ""
    """Why it ended, where that was an error."""
    num_cached: int = 0
    """Ids that it found in the prefix cache when it first started."""

    @property
    def prompt_record_bytes(self) -> int:
        return self.request.prompt_record_bytes if self.index == 0 else 0

    @property
    def is_recorded(self) -> bool:
        """Whether the executor tells anything of its ids, or of its prompt's."""
        return self.request.record_bytes > 0 or self.prompt_record_bytes > 0

    @property
    def first_times(self) -> FirstTimes:
        """Their place is set when they are sent."""
        return FirstTimes(0, self.request.queued_s, self.started_s, self.first_s, self.num_cached)
