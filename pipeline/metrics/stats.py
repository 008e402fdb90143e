"""The counts of a server: those that each stage reports, and the server's stats, which the supervisor builds from them.

Counters start at 0 with the stage. Structs are arrays on the wire: append fields only.
"""

from typing import assert_never

import msgspec

from pipeline.metrics.media_stats import EncoderCacheCounts, ImageCounts


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Base of all structs here."""


class EdgeCounts(Part, frozen=True):
    """Counts of one edge: a stage's connection to another."""

    to: str
    num_sent: int
    num_refused: int
    """Sends refused because the edge was full. Their content was sent later, merged into another message or as it
    was."""


class HistogramCounts(Part, frozen=True):
    """A histogram's values. pipeline.metrics.histogram has its bounds."""

    counts: list[int]
    """One count for each bucket, and a last one for values above all bounds."""
    total: float
    """Sum of all values."""


class GapCounts(Part, frozen=True):
    """Gaps before steps of one batch size that were planned before the previous step ended."""

    batch: int
    """Index into `pipeline.metrics.batch_size_buckets.BATCH_SIZE_BUCKETS`."""
    gap_s: HistogramCounts
    """One value for each step: the time since the end of the previous step, by the device's clock."""
    step_s: float
    """Total duration of the steps."""


class GatewayCounts(Part, frozen=True, tag="gateway"):
    """Requests count as sequences here: n for each prompt."""

    num_open: int
    """Open prompt requests: the client's request has not ended, or detokenize has not closed it."""
    num_opened: int
    """Admitted sequences. Each is later counted once, as finished or as rejected."""
    num_finished: list[int]
    """By `Finish`, from STOP on."""
    num_rejected: int
    """Sequences of prompts that ingest or schedule rejected."""
    num_overloaded: int
    """Requests answered with 503 because too many were open."""
    time_to_first_token_s: HistogramCounts
    inter_token_s: HistogramCounts
    e2e_s: HistogramCounts
    """One value for each sequence that ended with stop or length; also the next ones."""
    prompt_tokens: HistogramCounts
    output_tokens: HistogramCounts
    time_per_output_token_s: HistogramCounts
    max_tokens: HistogramCounts
    n: HistogramCounts
    longest_output_tokens: HistogramCounts
    """One value for each prompt: the length of its longest sequence."""
    num_open_tokens: int = 0
    """Prompt tokens of open requests, estimated until ingest has tokenized them."""
    max_open_tokens: int = 0
    """This gateway's share of `gateway.max_open_tokens`."""
    num_open_sequences: int = 0
    max_open_sequences: int = 0
    """This gateway's share of `gateway.max_open_sequences`."""
    num_timed_out: int = 0
    """Requests that ended at their deadline."""
    num_open_bytes: int = 0
    """What open requests keep in all processes (open_bytes.py), and replies that clients have not taken."""
    max_open_bytes: int = 0
    """This gateway's share of `gateway.max_open_bytes`."""
    num_preempted: int = 0
    """Requests that wait for room in this limit, after some output."""
    num_preemptions: int = 0
    """How often a request was preempted for it."""
    num_overloaded_by_size: int = 0
    """Part of `num_overloaded`: too many prompt tokens or bytes were open, not too many requests."""
    num_log_lines_dropped: int = 0
    """Lines of the access log that were not written."""
    pooled: dict[str, list[int]] = {}
    """By task, besides generate: requests, and inputs that were computed and their tokens."""
    num_given_up: int = 0
    """Replies and backlogs of streams that clients took too slowly while others needed their room."""
    num_open_media_bytes: int = 0  # encoded images
    max_open_media_bytes: int = 0


class IngestCounts(Part, frozen=True, tag="ingest"):
    num_waiting: int
    """Requests on which work has not started."""
    num_encoding: int
    """Long texts that are in the tokenizer's thread or wait for it."""
    num_accepted: int
    num_rejected: int
    num_tokens: int
    """Tokens of accepted prompts."""
    encode_s: float
    """Time spent on accepted prompts."""
    images: ImageCounts | None = None
    """None if the server takes none."""


class ScheduleLoad(Part, frozen=True, tag="schedule"):
    """The scheduler's counts. Blocks: free + cached + held == total."""

    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int
    num_blocks_total: int
    num_prompt_tokens: int = 0
    """Of sequences that started."""
    num_cached_tokens: int = 0
    """Part of `num_prompt_tokens` found in the prefix cache."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_swapped: int = 0
    """Sequences whose keys and values are in swap space. Sequences that will be recomputed count as waiting."""
    num_swap_blocks_free: int = 0
    num_swap_blocks_total: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_offloaded: int = 0
    """Full blocks that were copied to swap space when they were computed."""
    num_blocks_restored: int = 0
    """Those that were copied back instead of computed again."""
    num_forks: int = 0
    """Sequences that started with the keys and values of a sibling's prompt."""
    depth: int = 1
    """Current maximum of steps in flight."""
    num_recomputed_tokens: int = 0
    """Prompt tokens that were computed a second time: after a preemption without swap space, or the death of a
    process. None after the server has slept."""


NO_VALUES = HistogramCounts([], 0.0)


class KVGroupCounts(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of running sequences in a KV group; a shared block counts for each of them."""

    window: int
    """0: the group keeps all positions."""
    num_blocks: int


class SpeculationCounts(Part, frozen=True):
    """Speculative decoding since start."""

    num_drafts: int = 0
    """Proposals: one for each row and step for which any id was proposed."""
    num_draft_tokens: int = 0
    """Ids of these."""
    num_accepted_tokens: int = 0
    """Those that were right."""
    num_accepted_per_pos: list[int] = []
    """The same by their position in the proposal; empty without speculative decoding."""


class AdapterCounts(Part, frozen=True):
    """LoRA adapters in the scheduler, by their ids."""

    max_loras: int
    running: list[str]
    """Those with a slot."""
    waiting: list[str]
    """Those that wait for one."""


class StateSlotCounts(Part, frozen=True):
    """Slots for the states of a model with recurrent layers, and since start, what became of snapshots in them."""

    num_free: int
    num_cached: int
    """Those of snapshots that no sequence holds."""
    num_held: int
    num_total: int
    num_swap_free: int
    num_swap_total: int
    num_hits: int
    """Sequences that started behind a snapshot."""
    num_snapshots: int
    num_evictions: int
    num_restored: int
    """Copies from swap space."""
    num_swapped_out: int
    """Copies to swap space when a sequence was preempted."""
    num_offloaded: int
    """Copies of snapshots to swap space."""
    num_lost_tokens: int
    """Tokens whose KV was in the prefix cache, but that were computed again because the state behind them was not."""


class ScheduleCounts(ScheduleLoad, frozen=True, tag="schedule"):
    """The scheduler's counts, with its histograms."""

    queue_s: HistogramCounts = NO_VALUES
    """One value for each sequence that ended with stop or length; also the next three."""
    prefill_s: HistogramCounts = NO_VALUES
    decode_s: HistogramCounts = NO_VALUES
    inference_s: HistogramCounts = NO_VALUES
    step_tokens: HistogramCounts = NO_VALUES
    """Tokens computed by each step."""
    plan_s: float = 0.0
    """Time spent on planning."""
    settle_s: float = 0.0
    """Time spent on results."""
    plan_wait_s: HistogramCounts = NO_VALUES
    """One value for each step that was planned without waiting for requests: how long the executor waited for it."""
    gaps: list[GapCounts] = []
    """By batch size; only sizes with at least one gap."""
    kv_groups: list[KVGroupCounts] = []
    """Empty if there is only one, without a window."""
    speculation: SpeculationCounts = SpeculationCounts()
    adapters: AdapterCounts | None = None
    """None if adapters are off."""
    states: StateSlotCounts | None = None
    """None if the model has no recurrent layers."""
    encoder: EncoderCacheCounts | None = None
    """None if the server takes no images."""


class ExecuteCounts(Part, frozen=True, tag="execute"):
    num_rows: int
    num_steps: int
    num_tokens: int
    """Positions computed."""
    step_s: float
    """Time spent on steps."""
    wait_s: float
    """Time without a step to compute."""
    barrier_s: float = 0.0
    """Part of `step_s` in which this rank waited for others of its stage of the pipeline; 0 without ranks."""
    pipeline_wait_s: float = 0.0
    """Part of `step_s` in which this rank waited for other stages of the pipeline."""
    rank_name: str = ""
    """Of one of several ranks, as `pp0/tp1`: its stage of the pipeline, and its rank in that."""
    num_nan: int = 0
    """Sequences that failed because their logits were NaN."""


class DetokenizeCounts(Part, frozen=True, tag="detokenize"):
    num_sequences: int
    """Open sequences."""
    num_unsent: int
    """Open sequences with output that their gateway has not received."""
    num_tokens: int
    settle_s: float
    """Time spent on detokenization."""


OwnCounts = GatewayCounts | IngestCounts | ScheduleCounts | ExecuteCounts | DetokenizeCounts


class StageCounts(Part, frozen=True):
    """A stage's reply to `Count`."""

    num_received: int
    num_stale: int
    """Messages dropped because their incarnation has ended."""
    edges: list[EdgeCounts]
    own: OwnCounts | None
    """None before there is anything to count."""
    num_queued: int
    """Work that waits in this stage; see `num_queued`."""
    wait_s: float
    """Time the loop waited for messages. For an asyncio stage, the time that messages waited for the loop."""
    num_wakes: int
    arena_bytes: int
    """Size of the stage's shared-memory segment; 0 if it has none."""
    arena_bytes_used: int


class StageStats(Part, frozen=True):
    """One stage, as seen by the supervisor."""

    name: str
    pid: int
    state: str
    """starting, ready, late (did not answer in time), recovering, joining, leaving, stopping or dead"""
    num_restarts: int
    uptime_s: float
    rss_bytes: int
    """Resident memory. Shared segments count in every process that has touched them."""
    cpu_s: float
    """CPU time of all threads since the process started."""
    num_threads: int
    """0 if the stage has no process of its own; then the memory and CPU fields are 0 too. See `has_process`."""
    counts: StageCounts | None
    """The last counts received; None if there are none."""
    counts_age_s: float = 0.0
    """Age of `counts`: 0 if the stage has just answered."""
    node: str = ""
    """The host on which it runs; empty for the supervisor's."""

    @property
    def has_process(self) -> bool:
        """Whether the stage has a process of its own. False for a stage that has ended, and for a stage that runs as a
        thread of the supervisor (`pipeline serve --inline`); the supervisor's row then has the usage of all of them."""
        return self.num_threads > 0


class KeyUsage(Part, frozen=True):
    """What one API key has used since the server's start; see pipeline/runtime/security/key_usage.py. Only append
    counters."""

    name: str
    num_requests: int = 0
    """Requests that were opened, each once, whatever its `n`."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Part of these found in the prefix cache."""
    num_output_tokens: int = 0
    num_rate_limited: int = 0
    """Requests answered with 429."""
    num_overloaded: int = 0
    """Requests answered with 503 before they were opened."""
    num_invalid: int = 0
    """Requests refused with another error before they were opened."""


class SleepCounts(Part, frozen=True):
    """The server's sleeps since its start."""

    num_sleeps: int = 0
    num_bytes: int = 0
    """Saved by executors."""
    sleep_s: float = 0.0
    """Time to fall asleep."""
    wake_s: float = 0.0
    """Time to wake up."""
    is_asleep: bool = False


class ServerStats(Part, frozen=True):
    """The stats of a whole server."""

    server: str
    """The server's name: the supervisor's pid and some hexadecimal digits."""
    pid: int
    version: str
    model: str
    """Model name for clients; empty until prepare has ended."""
    address: str
    """HTTP address, such as `http://127.0.0.1:8000`."""
    state: str
    """starting, serving, draining or stopping"""
    uptime_s: float
    unix_s: float
    """When these stats were collected."""
    stages: list[StageStats]
    """The supervisor first, then the others in flow order."""
    num_blocks: int = 0
    """Number of KV blocks; 0 before the executor is ready. Also the next two."""
    block_size: int = 0
    max_model_len: int = 0
    quantization: str = ""
    """Formats of the quantized weights, such as `q4_1+q8_0`; "none" without any, empty before the executor is ready."""
    kv_dtype: str = ""
    """The type of the KV cache, such as `int8`; empty before the executor is ready."""
    adapters: dict[str, str] = {}
    """LoRA adapters that clients may use: ids by name."""
    backend: str = ""
    """What the executor computes with (`Backend`), as in /health; empty before it is ready."""
    is_batch_invariant: bool = True
    """As in `ExecuteFacts`."""
    keys: list[KeyUsage] = []
    """What each API key has used, by its name; of those too that the server has no more."""
    sleep: SleepCounts = SleepCounts()


def num_queued(own: OwnCounts | None) -> int:
    """Work that waits in a stage."""
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
