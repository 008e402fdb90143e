"""Every struct that crosses a process, grouped by the stage that receives it, with one union per inbox.

The wire is two ZeroMQ frames: an `Envelope`, then one message of the receiver's union, both MessagePack. Structs are
arrays on the wire: fields are appended, never reordered or removed. Packed arrays are little-endian; `Array` is
inline bytes or a reference into shared memory (see pipeline.shm.arrays); each field that holds one names its dtype.

Names of the ids: `request_id` is one prompt of a client's call (u64, drawn by the gateway at random); `attempt` counts
how often that request was submitted; `seq` is one sequence of a request (u64, counted by the scheduler within its
incarnation); `index` is the sequence's place among the request's n; `row` is the sequence's place in the executor
and `generation` tells two users of one row apart.
"""

from enum import IntEnum

import msgspec
from msgspec import Raw

from pipeline.config.settings import Settings
from pipeline.metrics.stats import ServerStats
from pipeline.shm.arrays import Array


class Message(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """What every message is. Subclasses give a tag."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Who sent the message that follows. Receivers drop what comes from an older incarnation than they know."""

    sender: str
    """Stage and replica, as `ingest.0`."""
    incarnation: int


class Finish(IntEnum):
    """Why a sequence ended; packed as u8. Each sequence has exactly one closing that carries something but `NONE`."""

    NONE = 0
    STOP = 1
    """An end-of-sequence id, a stop id, or a stop string."""
    LENGTH = 2
    ABORT = 3
    """The client left, or somebody asked for it."""
    ERROR = 4


# ---------------------------------------------------------------------------------------------- parts of messages


NOTHING_LEFT = "No token can be sampled"
"""What the error of a sequence begins with where its request's own fields contradict each other."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error in the client's words; the gateway puts it into OpenAI's shape."""

    status: int
    """The HTTP status it maps to: 400, 404, 413, 500, 503 …"""
    message: str
    param: str | None = None
    """The request's field that is to blame."""
    code: str | None = None


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are drawn. Read by the executor only; schedule passes it on undecoded."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """u64, always set by the gateway. Sequence i of n draws with a key derived from (seed, i)."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    with_logprobs: bool = False
    """The record of each id is its log probability, by the model's own distribution: before temperature, filters,
    penalties and masks."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. See kernels/penalties.py, as for the next two."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: list[int] = []
    """Ids to whose logits something is added, each at most once."""
    bias_values: list[float] = []
    """Parallel: what is added."""
    allowed_ids: bytes = b""
    """int32, rising; empty allows all"""
    bad_words: list[list[int]] = []
    """Runs of ids that the output never has: the last id of one is not drawn behind the others."""
    min_tokens: int = 0
    """Ids of the output before which none is drawn that ends it."""
    num_top: int = 0
    """The record of each id has this many of the likeliest ids besides; see pipeline/runtime/logprob_records.py."""
    prompt_num_top: int = -1
    """Likewise for the ids of the prompt, all but the first; -1 wants no records of them."""
    pooling: int = 0
    """`Pooling`. One id is drawn, which means nothing; its record is the prompt's embedding."""
    grammar: str = ""
    """What the output is to match, in llguidance's own form (JSON or Lark), checked by ingest; empty is anything."""


class TextOptions(msgspec.Struct, array_like=True, frozen=True):
    """How ids become text. Read by detokenize only; schedule passes it on undecoded."""

    stop: list[str] = []
    """Stop strings. The text ends before the first match."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: list[int] = []
    """To tell the client which id stopped it (`stop_reason`); the executor is who stops."""
    record_bytes: int = 0
    """Bytes of each id's record, as `Sampling` asks for it; 0 has none. The gateway is told those of the ids that
    count."""
    num_top: int = 0
    """As in `Sampling`; likewise"""
    prompt_num_top: int = -1
    with_pieces: bool = False
    """The gateway is told the bytes of each id that a record names."""
    min_tokens: int = 0
    """Stop strings that end within the text of the first so many ids don't count."""


class Pooling(IntEnum):
    """How the hidden states of a prompt's tokens, behind the last norm, become its embedding."""

    NONE = 0
    MEAN = 1
    LAST = 2


class ToolCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of a tool in an assistant's message."""

    id: str
    name: str
    arguments: str
    """JSON text, as the client gave it"""


class ChatMessage(msgspec.Struct, array_like=True, frozen=True):
    role: str
    content: str | None
    """None where an assistant's message has tool calls alone."""
    name: str | None = None
    parts: list[str] | None = None
    """The texts of `content`, where the client gave it in parts."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning: str | None = None
    """What an assistant thought before it said `content`."""


class ChatPrompt(msgspec.Struct, array_like=True, frozen=True, tag="chat"):
    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The output goes on with the last message."""
    tools: str = ""
    """JSON text: the array of tools as the client gave it, checked by the gateway; empty where there are none."""
    tool_choice: str = "auto"
    """none, auto, required or named"""
    tool_name: str = ""
    """Whom `named` names."""
    parallel_tool_calls: bool = True
    documents: str = ""
    """JSON text: an array for the template."""
    template_kwargs: str = ""
    """JSON text: an object of further names for the template."""


class TextPrompt(msgspec.Struct, array_like=True, frozen=True, tag="text"):
    text: str


class IdsPrompt(msgspec.Struct, array_like=True, frozen=True, tag="ids"):
    ids: Array
    """int32"""


Prompt = ChatPrompt | TextPrompt | IdsPrompt


class FirstTimes(msgspec.Struct, array_like=True, frozen=True):
    """How a sequence came to the first id that was sampled for it, by time.monotonic(); goes with that id."""

    place: int
    """Of the entry that has that id, in the message's lists."""
    queued_s: float
    """Schedule took it in."""
    started_s: float
    """A step was planned that computes a part of it."""
    first_s: float
    """Its first id was settled."""
    num_cached: int
    """Ids of its prompt that were found in the prefix cache."""


MAX_SHOWN_IDS = 2**18
"""The most ids of a prompt from which nothing is computed, so that no answer holds up the others for long."""


class PromptOptions(msgspec.Struct, array_like=True, frozen=True):
    """How ingest makes a prompt's ids, and what of it `Accepted` says besides."""

    add_special_tokens: bool | None = None
    """Those of the tokenizer. None: around texts, and not around chats, whose templates write their own."""
    any_length: bool = False
    """Nothing will be computed from it: it may be empty, or longer than the model's context."""
    with_text: bool = False
    with_token_strs: bool = False
    truncate: int = 0
    """Keep the last so many ids alone; 0 keeps all, -1 as many as the model's context leaves room for."""
    with_pieces: bool = False
    with_tail: bool = False
    """The end of a chat's text, which says whether it opens the model's reasoning; see pipeline/text/formats."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What a client wants its output to match, as it gave it; ingest makes `Sampling.grammar` of it."""

    kind: str
    """json_object, json_schema, closed_schema (whose objects have no properties but those that it names), regex,
    choice, grammar or structural_tag; or calls, of tools. With `compact_` before it, JSON of an object, a schema or a
    tag has no white space"""
    source: str = ""
    """JSON text of a schema, of an array of strings, of a structural tag, or of a `Written` (pipeline/text/formats); a
    pattern; a grammar"""
    param: str = ""
    """The request's field that said so, for errors."""


# ------------------------------------------------------------------------------- said by the supervisor to any stage


class ExecuteFacts(msgspec.Struct, array_like=True, frozen=True):
    """What the executor learns while it starts."""

    num_blocks: int
    block_size: int
    max_model_len: int
    """Longest sequence this server takes: the model's limit, the settings' and the KV memory's."""
    vocab_size: int
    num_swap_blocks: int = 0
    """Blocks that its swap segment holds."""
    hidden_size: int = 0
    """Numbers of an embedding."""


class Start(Message, frozen=True, tag="start"):
    """All stages are ready: begin. Nothing else is sent before it."""

    facts: ExecuteFacts


class Ping(Message, frozen=True, tag="ping"):
    """Answered with `Pong` through the ordinary loop, so that an answer proves that the loop turns."""

    nonce: int


class Stop(Message, frozen=True, tag="stop"):
    """End now, with exit code 0. Sent in flow order, after the stages before have ended."""


Control = Start | Ping | Stop


# ---------------------------------------------------------------- asked by the supervisor of any stage, beside its work


class Count(Message, frozen=True, tag="count"):
    """Answered with the stage's `StageCounts` (see pipeline.metrics.stats)."""

    nonce: int


class Record(Message, frozen=True, tag="record"):
    """Begin to record what the inbox receives; see pipeline.replay. In a `Launch`: from the stage's start."""

    nonce: int
    path: str
    """Absolute; what is there is replaced."""
    max_bytes: int = 2**32
    max_s: float = 1e9
    """Seconds; without end by default."""
    with_sent: bool = True
    """Record what the stage sends too."""
    facts: ExecuteFacts | None = None
    """What `Start` said, if it has."""
    lease_s: float = 0.0
    """Who began it says `KeepRecord` more often than this, or is taken for dead, and the recording ends. 0: nobody has
    to."""


class EndRecord(Message, frozen=True, tag="end_record"):
    """End the recording that was begun. Answered at once with `RecordState` (see pipeline.replay.recorder): a thread
    writes what is left, so to be asked again until the file is closed."""

    nonce: int
    path: str = ""
    """Which; empty is any."""


class Flame(Message, frozen=True, tag="flame"):
    """Sample the stage's stack from now on; see pipeline.runtime.flame_profiler. Answered with nil."""

    nonce: int


class EndFlame(Message, frozen=True, tag="end_flame"):
    """End sampling; answered with `Stacks` (see there)."""

    nonce: int


class Trace(Message, frozen=True, tag="trace"):
    """Record spans from now on, for so long. Answered with nil."""

    nonce: int
    window_s: float


class TakeTrace(Message, frozen=True, tag="take_trace"):
    """End the window and hand over what was recorded; answered with `StageTrace` (see pipeline.runtime.tracing)."""

    nonce: int


class FindRequest(Message, frozen=True, tag="find_call"):
    """To gateways: the times of a call that has ended not long ago; answered with `RequestTimings` (see
    pipeline.metrics.request_timings), or nil where the gateway does not know it."""

    nonce: int
    call_id: str


class KeepRecord(Message, frozen=True, tag="keep_record"):
    """Who began this recording is still there. Answered with `RecordState`."""

    nonce: int
    path: str


ControlRequest = Count | Trace | TakeTrace | FindRequest | Record | EndRecord | Flame | EndFlame | KeepRecord
"""Every stage takes these besides its own union, and none of them sees one: its inbox hands them to
pipeline.runtime.control_requests, which answers each with one `Answer`. An aside has a `nonce`, which the supervisor
sets."""


# ----------------------------------------------------------------------------------------------------- to supervisor


class ScheduleLoad(msgspec.Struct, array_like=True, frozen=True, tag="schedule"):
    """The scheduler's counts. Blocks: free + cached + held == total."""

    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int
    num_blocks_total: int
    num_prompt_tokens: int = 0
    """Since start."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_swapped: int = 0
    """Sequences whose keys and values are in swap space; those that wait to be computed again are waiting."""
    num_swap_blocks_free: int = 0
    num_swap_blocks_total: int = 0
    num_blocks_swapped_out: int = 0
    """Since start; as below."""
    num_blocks_swapped_in: int = 0
    num_forks: int = 0
    """Sequences that began with the keys and values of a sibling's prompt."""
    depth: int = 1
    """Steps in flight at most, as it is now."""


class GatewayLoad(msgspec.Struct, array_like=True, frozen=True, tag="gateway"):
    num_open_requests: int


class PlainLoad(msgspec.Struct, array_like=True, frozen=True, tag="plain"):
    """What a stage says that has nothing of its own to count."""

    num_open: int = 0
    """Requests or sequences this stage holds something for."""


Load = ScheduleLoad | GatewayLoad | PlainLoad


class Ready(Message, frozen=True, tag="ready"):
    """The stage has loaded what it needs and its inbox is open."""

    facts: ExecuteFacts | None = None


class Failed(Message, frozen=True, tag="failed"):
    """The stage ends with a non-zero code, and this is why, in a line or two."""

    reason: str


class Pong(Message, frozen=True, tag="pong"):
    nonce: int
    load: Load


class AskServerStats(Message, frozen=True, tag="ask_server_stats"):
    """From the gateway. The supervisor counts every stage and answers with `StatsAnswer`."""

    nonce: int


class AskHealth(Message, frozen=True, tag="ask_health"):
    """From the gateway. The supervisor pings every stage and answers with `Health`."""

    nonce: int


class Drained(Message, frozen=True, tag="drained"):
    """From the gateway: no stream is open any more, and none is accepted."""


class Prepared(Message, frozen=True, tag="prepared"):
    """From prepare: the folder it leaves for the others."""

    model_dir: str
    model_name: str


class Answer(Message, frozen=True, tag="answer"):
    """To an `ControlRequest`."""

    nonce: int
    body: Raw = Raw(b"\xc0")
    """What whoever asked can decode; the supervisor passes it on as it is. Nil where there is nothing to say."""
    error: str = ""
    """Why the aside was not done, in the user's words; empty where it was."""


SupervisorInbox = Prepared | Ready | Failed | Pong | AskHealth | Drained | Answer | AskServerStats


# -------------------------------------------------------------------------------------------------------- to gateway


class Accepted(Message, frozen=True, tag="accepted"):
    """From ingest: the prompt's ids, so that the gateway can count them, and re-drive without running a
    template twice."""

    request_id: int
    attempt: int
    prompt_ids: Array
    """int32"""
    text: str | None = None
    """The prompt's, where `Submit.prompt_options` asks for it: as the client wrote it, or what its ids say. Where
    output follows, a character whose last bytes are still to come is left to it."""
    token_strs: list[str] | None = None
    """What the vocabulary calls each id, where `Submit.prompt_options` asks for it."""
    began_s: float = 0.0
    """When ingest took the request up; this and every `_s` of its kind is by time.monotonic(), which all processes of a
    machine share."""
    done_s: float = 0.0
    """When it had the ids."""
    pieces: list[bytes] | None = None
    """The bytes of text that each id stands for, where `Submit.prompt_options` asks for it."""
    tail: str | None = None
    """The last characters of a chat's text, as many as pipeline/text/formats wants at least, where
    `Submit.prompt_options` asks for them."""


class Rejected(Message, frozen=True, tag="rejected"):
    """From ingest or (passed on by detokenize) schedule. Closes every sequence of the request."""

    request_id: int
    attempt: int
    failure: Failure


class Deltas(Message, frozen=True, tag="deltas"):
    """From detokenize: what has become of some sequences; parallel lists, one entry a sequence, at most one each."""

    request_ids: list[int]
    attempts: list[int]
    indexes: list[int]
    texts: list[str]
    text_offsets: list[int]
    """Characters of the sequence's text before this one."""
    ids: bytes
    """int32; the ids of all entries, one after the other."""
    id_offsets: list[int]
    """Output ids of the sequence before these."""
    num_ids: list[int]
    finishes: list[int]
    """`Finish` values."""
    stop_reasons: list[str | int | None]
    """The stop string or stop id that ended it, where one did."""
    firsts: list[FirstTimes] = []
    """Of the entries that have the first id sampled for their sequence."""
    settled_s: float = 0.0
    """When schedule sent the newest ids in here."""
    sent_s: float = 0.0
    """When detokenize sent this."""
    records: list[bytes] = []
    """By entry, those of its ids, or nothing where its `TextOptions` don't ask for them; see
    pipeline/runtime/logprob_records.py. Empty where none of the entries has any, as the next."""
    pieces: list[list[bytes]] = []
    """By entry, where its `TextOptions` ask for them: for each record the bytes of its id, then of the ids it names."""
    prompt_places: list[int] = []
    """Entries that come with records of their prompt's ids; as below, parallel. Such an entry may have no ids."""
    prompt_offsets: list[int] = []
    """Records of the prompt before these."""
    prompt_records: list[bytes] = []
    """Of prompt ids, from the second on"""
    prompt_pieces: list[list[bytes]] = []
    """Where `TextOptions` ask for pieces: the bytes of the ids that each record names. Of the prompt's own ids,
    `Accepted` has them."""
    errors: list[str] = []
    """Why, for each entry whose finish is `ERROR`, in order; empty where nobody said."""


class StageHealth(msgspec.Struct, array_like=True, frozen=True):
    name: str
    pid: int
    state: str
    """starting, ready, late (did not answer in time), stopping or dead"""
    answer_ms: float
    """How long the answer took; -1 where there was none."""


class Health(Message, frozen=True, tag="health"):
    nonce: int
    status: str
    """ok, or the worst of its stages' states: dead, late, stopping, starting"""
    stages: list[StageHealth]
    schedule: ScheduleLoad | None
    num_open_elsewhere: int = 0
    """Requests open at other gateways than the one that asked."""


class Drain(Message, frozen=True, tag="drain"):
    """Accept no more; answer `Drained` when the last stream has ended. Streams that are still open at the deadline
    are ended with a clear final event."""

    deadline_s: float
    """Seconds from now."""


class StageDied(Message, frozen=True, tag="stage_died"):
    """The server is going down: end every stream with this reason."""

    stage: str
    reason: str


class StatsAnswer(Message, frozen=True, tag="stats_answer"):
    """From the supervisor: the whole server's stats."""

    nonce: int
    stats: ServerStats


class AbortRequests(Message, frozen=True, tag="abort_calls"):
    """From another gateway, where a client has asked for it: end these calls. Answered with `RequestsAborted`."""

    gateway: int
    """Replica that asks."""
    nonce: int
    names: list[str]
    """Ids of responses, or clients' own ids of their requests."""
    scope: str = ""
    """Of the API key that asks (see pipeline.runtime.api_keys): calls of other scopes are not touched. Empty: without a
    key."""


class RequestsAborted(Message, frozen=True, tag="calls_aborted"):
    """To the gateway that asked, from one of the others."""

    gateway: int
    """Replica that answers."""
    nonce: int
    places: list[int]
    """Of `AbortRequests.names`, the places of those that were open here."""


class PrefixCacheReset(Message, frozen=True, tag="prefix_cache_reset"):
    """From schedule, passed on by detokenize as it is: the answer to `ResetPrefixCache`."""

    gateway: int
    """Replica that asked."""
    nonce: int
    num_blocks: int
    """KV blocks whose content nobody finds any more."""


GatewayInbox = (
    Accepted
    | Rejected
    | Deltas
    | Health
    | Drain
    | StageDied
    | AbortRequests
    | RequestsAborted
    | StatsAnswer
    | PrefixCacheReset
    | Start
    | Ping
    | Stop
)


# --------------------------------------------------------------------------------------------------------- to ingest


class Submit(Message, frozen=True, tag="submit"):
    """From the gateway: one prompt to generate from."""

    request_id: int
    attempt: int
    gateway: int
    """Replica that gets the answers."""
    arrival_s: float
    """Unix time, stamped by the gateway; the scheduler's order."""
    prompt: Prompt
    n: int
    max_tokens: int | None
    """None: as many as fit. 0: none; `Accepted` closes the request, and schedule never hears of it."""
    sampling: Sampling
    text: TextOptions
    outputs: list[Array] = []
    """int32; output ids that the client has already, one array a sequence; none of them for a fresh request"""
    prompt_options: PromptOptions = PromptOptions()
    priority: int = 0
    """Lower goes first, where the scheduler's policy is `priority`."""
    cache_salt: str = ""
    """Only prompts with the same salt share KV blocks. With API keys the client's own within the scope of its key
    (`api_keys.scoped_salt`)."""
    grammar: Grammar | None = None
    bad_words: list[str] = []
    """Texts that the output never has; ingest makes ids of them."""


class Abort(Message, frozen=True, tag="abort"):
    """To ingest and schedule: end this request, or one sequence of it. Idempotent; overtakes its request harmlessly."""

    request_id: int
    attempt: int
    index: int = -1
    """The sequence to end; -1 ends all."""
    finish: int = Finish.ABORT
    """What its closing says: detokenize sends STOP when it has found a stop string."""


class Release(Message, frozen=True, tag="release"):
    """Slabs of the receiver's own arena that the sender has read: parallel lists."""

    offsets: list[int]
    generations: list[int]


IngestInbox = Submit | Abort | Release | Start | Ping | Stop


# ------------------------------------------------------------------------------------------------------- to schedule


class Admit(Message, frozen=True, tag="admit"):
    """From ingest: a request that is ready to be computed."""

    request_id: int
    attempt: int
    gateway: int
    arrival_s: float
    prompt_ids: Array
    """int32"""
    n: int
    max_tokens: int
    """Output ids at most; prompt and output together fit max_model_len."""
    sampling: Raw
    """`Sampling`, undecoded."""
    text: Raw
    """`TextOptions`, undecoded."""
    outputs: list[Array] = []
    """int32; output ids that are known already, one array a sequence; none of them for a fresh request"""
    finishes: bytes = b""
    """uint8, parallel: `Finish`; STOP where the last of these ids ends the sequence, else NONE"""
    priority: int = 0
    """As in `Submit`; likewise"""
    cache_salt: str = ""
    record_bytes: int = 0
    """Bytes of each output id's record; 0 has none."""
    prompt_record_bytes: int = 0
    """Likewise for the prompt's ids, all but the first, by the first sequence of the request"""
    needs_full_prefill: bool = False
    """Every position of the prompt has to be computed, by each sequence and in one go: nothing is taken from the prefix
    cache, and what is preempted on the way begins again."""


class StepResult(Message, frozen=True, tag="step_result"):
    """From the executor: what a step sampled. One entry for each of the step's whose `samples` was set, in order."""

    incarnation: int
    """The scheduler's that planned the step."""
    step_id: int
    rows: Array
    """int32"""
    generations: Array
    """uint32, of the rows"""
    ids: Array
    """int32; -1 where the row was dead already"""
    finishes: Array
    """uint8, `Finish`: STOP where the id ends the sequence, ERROR where there is none, else NONE"""
    compute_s: float
    wait_s: float
    """How long the executor had nothing to do before this step."""
    copy_s: float = 0.0
    """The part of `compute_s` that went into the step's copies."""
    records: Array = b""
    """uint8: the records of `ids`, of the rows that ask for them, one after the other; see
    pipeline/runtime/logprob_records.py. A row that had ended has none."""
    prompt_records: Array = b""
    """uint8: of the step's entries that ask for records of their prompt, in order, those of the ids behind each
    position that was computed, as far as they are the prompt's; none for a row that had ended"""
    errors: list[str] = []
    """Why, for each entry whose finish is `ERROR`, in order: no id could be drawn for it, `ids` has -1, and its
    sequence ends."""


class Closed(Message, frozen=True, tag="closed"):
    """From the gateway: the client has everything; the log of this request may go."""

    request_id: int
    attempt: int


class ResetPrefixCache(Message, frozen=True, tag="reset_prefix_cache"):
    """From the gateway: what has been computed up to now is not to be found by any prompt any more. Answered with
    `PrefixCacheReset`."""

    gateway: int
    """Replica that asks."""
    nonce: int


ScheduleInbox = Admit | Abort | StepResult | Closed | ResetPrefixCache | Release | Start | Ping | Stop


# -------------------------------------------------------------------------------------------------------- to execute


class RowAdd(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a row."""

    row: int
    generation: int
    index: int
    """The sequence's place among the request's n; part of its noise key."""
    ids: Array
    """int32; every id known so far: the prompt, and outputs if the sequence was preempted"""
    num_prompt: int
    blocks: Array
    """int32; its block table so far"""
    sampling: Raw
    request_id: int = 0
    """For traces alone."""
    fork_of: int = -1
    """A running row of the same request, whose first `num_prompt` ids are this one's too: `ids` then has only those
    behind them."""


class Step(Message, frozen=True, tag="step"):
    """What one step computes, as changes against the executor's rows: drop, add, append, copy, compute, in this order.

    Copies are of whole blocks, with all layers, one after the other as they are listed: a block that was copied from
    may be copied to by a later one. Ids from `ExecuteFacts.num_blocks` on are blocks of the swap segment. What steps
    before this one write is there when they are made, and nothing that this step computes is.

    Entry i computes positions `starts[i] .. starts[i] + counts[i]` of `rows[i]`. A row that the executor has ended is
    skipped: it writes no KV and emits no id. Entries that sample write their id to the row at `starts + counts`.
    All KV of a step is written, layer by layer, before any attention of that layer reads it, so that a row may
    start behind a prefix that another row of the same step computes.
    """

    incarnation: int
    step_id: int
    drops: Array
    """int32; rows that end"""
    adds: list[RowAdd]
    block_rows: Array
    """int32; parallel with `block_ids`: blocks appended to a row's table, in order"""
    block_ids: Array
    """int32"""
    rows: Array
    """int32; decode rows first"""
    starts: Array
    """int32"""
    counts: Array
    """int32"""
    samples: Array
    """uint8; 1 where the last computed position is the row's last id, so that the next id is drawn"""
    copy_sources: Array = b""
    """int32; parallel with `copy_targets`"""
    copy_targets: Array = b""
    """int32"""


ExecuteInbox = Step | Release | Start | Ping | Stop


# ----------------------------------------------------------------------------------------------------- to detokenize


class Open(Message, frozen=True, tag="open"):
    """From schedule: a sequence begins. Closed by the `Settled` entry that carries its finish."""

    seq: int
    request_id: int
    attempt: int
    index: int
    gateway: int
    prompt_tail: bytes
    """int32; the prompt's last ids: a first output token may continue a character or a word of it"""
    text: Raw
    outputs: Array = b""
    """int32; output ids that the client has already"""
    finish: int = Finish.NONE
    """How these ids end the sequence, if they do; a `Settled` without further ids will say so."""


class Settled(Message, frozen=True, tag="settled"):
    """From schedule: ids that can't change any more; parallel arrays. A sequence that was preempted and runs again may
    have two entries, in the order of its ids."""

    seqs: Array
    """uint64"""
    starts: Array
    """int32; output ids of the sequence before these"""
    counts: Array
    """int32"""
    ids: Array
    """int32; of all entries, one after the other"""
    finishes: Array
    """uint8, `Finish`. STOP says that the last id is the one that stopped it."""
    firsts: list[FirstTimes] = []
    """Of the entries that have the first id sampled for their sequence."""
    settled_s: float = 0.0
    """When this was sent, by time.monotonic()."""
    records: Array = b""
    """uint8: those of `ids`, of the entries that ask for them, one after the other"""
    prompt_seqs: list[int] = []
    """Sequences whose prompt has records here; as below, parallel. They have not been told here to end before."""
    prompt_starts: list[int] = []
    """Records of the prompt before these"""
    prompt_records: list[bytes] = []
    errors: list[str] = []
    """Why, for each entry whose finish is `ERROR`, in order; empty where nobody said."""


class Refuse(Message, frozen=True, tag="refuse"):
    """From schedule: a request that was never opened; passed on to the gateway as `Rejected`."""

    request_id: int
    attempt: int
    gateway: int
    failure: Failure


DetokenizeInbox = Open | Settled | Refuse | PrefixCacheReset | Start | Ping | Stop


# -------------------------------------------------------------------------------------------------------- at the start


class Segment(msgspec.Struct, array_like=True, frozen=True):
    """A shared-memory segment a child inherits."""

    name: str
    fd: int
    num_bytes: int
    writable: bool


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """An inbox that a child may send to."""

    name: str
    address: str
    bound: int
    """Messages that may wait on this edge."""


class Replay(msgspec.Struct, array_like=True, frozen=True):
    """A stage is driven by a recording rather than by its neighbours."""

    path: str
    out: str
    """Where what it sends is written."""
    paced: bool = False
    """At the recorded times, rather than as fast as the stage can."""


class Launch(msgspec.Struct, array_like=True, frozen=True):
    """All that a child is told when it is started; read from an inherited descriptor."""

    stage: str
    replica: int
    rank: int
    incarnation: int
    entry: str
    """Dotted module whose `run` is called."""
    settings: Settings
    model_dir: str
    """What prepare left; empty for prepare itself."""
    address: str
    """Of its own inbox."""
    peers: list[Peer]
    segments: list[Segment]
    death_fd: int
    """Reads end-of-file when the supervisor is gone."""
    listen_fd: int = -1
    """The HTTP socket, for the gateway."""
    record: Record | None = None
    replay: Replay | None = None
    foreground: bool = False
    """It has the terminal, for a debugger."""
    break_at: str = ""
    """A function, as `pipeline.stages.schedule.scheduler:Scheduler.admit`, whose calls stop in the debugger."""
    keys_fd: int = -1
    """Digests of API keys, for the gateway; see pipeline.runtime.api_keys. -1: there are none, and none is asked
    for."""
    admin_fd: int = -1
    """The socket of the gateway's admin listener; -1: it has none."""

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.replica}"
