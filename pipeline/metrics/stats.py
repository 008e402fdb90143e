"""What a server counts: the parts that each stage hands over, and the whole that the supervisor makes of them.

Counters are since the stage's start and only grow. Structs are arrays on the wire: fields are appended.
"""

from typing import assert_never

import msgspec


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What every struct here is."""


class EdgeCounts(Part, frozen=True):
    """One way out of a stage."""

    to: str
    num_sent: int
    num_refused: int
    """Sends that found the edge at its bound; what they carried went later, merged or kept by its sender."""


class HistogramCounts(Part, frozen=True):
    """A histogram as it travels; its bounds go with its name (see pipeline.metrics.histogram)."""

    counts: list[int]
    """Values at most the first bound, above that and at most the second, …, above the last."""
    total: float
    """The sum of all values."""


class GapCounts(Part, frozen=True):
    """Of steps of one batch size that were there to be computed as soon as the executor had done with those before."""

    batch: int
    """Its place in `pipeline.metrics.batch_size_buckets.BATCH_SIZE_BUCKETS`."""
    gap_s: HistogramCounts
    """One value for each: from the end of the step before to its beginning, by the clock of the device."""
    step_s: float
    """How long they took themselves."""


class GatewayCounts(Part, frozen=True, tag="gateway"):
    """A request in these counts is a sequence: each of a call's n, for each of its prompts."""

    num_open: int
    """Prompts that are open now, their clients' calls not over or their closings not come."""
    num_opened: int
    """Sequences let in. Each is later counted once below, as finished or as rejected."""
    num_finished: list[int]
    """By `Finish`, from STOP on."""
    num_rejected: int
    """Sequences of prompts that ingest or schedule refused."""
    num_overloaded: int
    """Calls turned away at the door with 503, for want of credits."""
    time_to_first_token_s: HistogramCounts
    inter_token_s: HistogramCounts
    e2e_s: HistogramCounts
    """This and the following have one value for each sequence that ended by stop or length."""
    prompt_tokens: HistogramCounts
    output_tokens: HistogramCounts
    time_per_output_token_s: HistogramCounts
    max_tokens: HistogramCounts
    n: HistogramCounts
    longest_output_tokens: HistogramCounts
    """One value for each prompt: of the longest of its sequences."""
    num_open_tokens: int = 0
    """Prompt tokens of what is open; those of prompts that ingest has not tokenized are estimated."""
    max_open_tokens: int = 0
    """This gateway's share of `gateway.max_open_tokens`."""
    num_open_sequences: int = 0
    max_open_sequences: int = 0
    """Its share of `gateway.max_open_sequences`."""
    num_timed_out: int = 0
    """Calls that were ended at their deadline."""


class IngestCounts(Part, frozen=True, tag="ingest"):
    num_waiting: int
    """Requests that nobody has begun to work on."""
    num_encoding: int
    """Long texts, in the thread or waiting for it."""
    num_accepted: int
    num_rejected: int
    num_tokens: int
    """Of the prompts accepted."""
    encode_s: float
    """Time spent on them, from taking one up to having its ids."""


class ScheduleCounts(Part, frozen=True, tag="schedule"):
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int
    num_blocks_total: int
    num_prompt_tokens: int
    """Of sequences that started."""
    num_cached_tokens: int
    """Of these, found in the prefix cache."""
    num_output_tokens: int
    num_preemptions: int
    num_steps: int
    queue_s: HistogramCounts
    """This and the following three have one value for each sequence that ended by stop or length."""
    prefill_s: HistogramCounts
    decode_s: HistogramCounts
    inference_s: HistogramCounts
    step_tokens: HistogramCounts
    """Tokens computed by each step."""
    plan_s: float
    """Time spent on plans."""
    settle_s: float
    """Time spent on results."""
    num_swapped: int = 0
    """As in `ScheduleLoad`; likewise"""
    num_swap_blocks_free: int = 0
    num_swap_blocks_total: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_forks: int = 0
    depth: int = 1
    """As in `ScheduleLoad`"""
    plan_wait_s: HistogramCounts = HistogramCounts([], 0.0)
    """One value for each step that was planned without a wait for requests: how long the executor waited for it."""
    gaps: list[GapCounts] = []
    """The same by the size of the step's batch, of those there have been any of."""


class ExecuteCounts(Part, frozen=True, tag="execute"):
    num_rows: int
    num_steps: int
    num_tokens: int
    """Positions computed."""
    step_s: float
    """Time spent on steps."""
    wait_s: float
    """Time between steps, with nothing to compute."""


class DetokenizeCounts(Part, frozen=True, tag="detokenize"):
    num_sequences: int
    """Live now."""
    num_unsent: int
    """Of these, with something that their gateway has not taken yet."""
    num_tokens: int
    settle_s: float
    """Time spent on making text."""


OwnCounts = GatewayCounts | IngestCounts | ScheduleCounts | ExecuteCounts | DetokenizeCounts


class StageCounts(Part, frozen=True):
    """What a stage answers to `Count`."""

    num_received: int
    num_stale: int
    """Dropped: from an incarnation that is over."""
    edges: list[EdgeCounts]
    own: OwnCounts | None
    """None before there is anything to count."""
    num_queued: int
    """What waits in this stage for its turn; see `num_queued`."""
    wait_s: float
    """How long its loop has waited for messages; for an asyncio stage, how long messages have waited for its loop to
    come round."""
    num_wakes: int
    arena_bytes: int
    """Of its shared-memory segment; 0 where it has none."""
    arena_bytes_used: int


class StageStats(Part, frozen=True):
    """One stage, as the supervisor sees it."""

    name: str
    pid: int
    state: str
    """starting, ready, late (did not answer in time), stopping or dead"""
    num_restarts: int
    uptime_s: float
    rss_bytes: int
    """Resident memory, of which shared segments are counted in every process that has touched them."""
    cpu_s: float
    """User and system time of all its threads since its start."""
    num_threads: int
    """0, and no memory nor time either, where it has no process of its own: see `has_process`."""
    counts: StageCounts | None
    """The last that it gave; None where it has not given any."""
    counts_age_s: float = 0.0
    """How old they are: 0 where it has just answered."""

    @property
    def has_process(self) -> bool:
        """Whether there is a process of its own: not of a stage that has ended, nor of a thread of the supervisor's
        (`pipeline serve --inline`), where the supervisor has what all of them take."""
        return self.num_threads > 0


class ServerStats(Part, frozen=True):
    """A whole server."""

    server: str
    """Its name: the supervisor's pid and some hexadecimal digits."""
    pid: int
    version: str
    model: str
    """The name that clients use; empty while it is prepared."""
    address: str
    """Of the HTTP door, as `http://127.0.0.1:8000`."""
    state: str
    """starting, serving, draining or stopping"""
    uptime_s: float
    unix_s: float
    """When these stats were made."""
    stages: list[StageStats]
    """The supervisor first, then the others in flow order."""
    num_blocks: int = 0
    """KV blocks there are; 0 before the executor is ready, as below."""
    block_size: int = 0
    max_model_len: int = 0


def num_queued(own: OwnCounts | None) -> int:
    """What waits in a stage for its turn."""
    match own:
        case None | ExecuteCounts():
            return 0
        case GatewayCounts():
            return own.num_open
        case IngestCounts():
            return own.num_waiting + own.num_encoding
        case ScheduleCounts():
            return own.num_waiting
        case DetokenizeCounts():
            return own.num_unsent
        case _:
            assert_never(own)
