"""The envelope, the messages that several stages receive, and the parts that several messages share."""

from collections.abc import Collection
from enum import IntEnum

import msgspec

from pipeline.runtime.model.kv_groups import KVGroup


class Message(msgspec.Struct, array_like=True, frozen=True, tag_field="kind"):
    """Base of all messages. Subclasses give a tag."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The sender of the message that follows. Receivers drop messages of older incarnations than they know."""

    sender: str
    """Stage and replica, as `ingest.0`."""
    incarnation: int


class Finish(IntEnum):
    """Why a sequence ended; packed as u8. Each sequence has exactly one closing with a value other than `NONE`."""

    NONE = 0
    STOP = 1
    """An end-of-sequence id, a stop id, or a stop string."""
    LENGTH = 2
    ABORT = 3
    """The client disconnected or aborted the request."""
    ERROR = 4


NOTHING_LEFT = "No token can be sampled"
"""Prefix of a sequence's error if the fields of its request contradict each other."""


DIED_OF_REQUEST = " times while it worked on this request"
"""End of a request's error if it kills a stage again and again."""


NAN_LOGITS = "The model produced NaN logits"
"""A sequence's error if no token has a logit that is a number."""


ADAPTER_FAILED = "The LoRA adapter can't be loaded"
"""Prefix of a sequence's error. Its KV blocks were computed without the adapter."""


GRAMMAR_FAILED = "The grammar failed"
"""Prefix of a sequence's error if its grammar could be used at first, but not to the end."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error message for the client. The gateway puts it into OpenAI's format."""

    status: int
    """HTTP status: 400, 404, 413, 500, 503 …"""
    message: str
    param: str | None = None
    """The field of the request that caused it."""
    code: str | None = None


class FirstTimes(msgspec.Struct, array_like=True, frozen=True):
    """When a sequence reached its first sampled id, by time.monotonic(). Sent with that id."""

    index: int
    """Index of its entry in the lists of the message."""
    queued_s: float
    """The scheduler received the request."""
    started_s: float
    """The first step that computes a part of it was planned."""
    first_s: float
    """Its first id was settled."""
    num_cached: int
    """Ids of its prompt that were found in the prefix cache."""


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that clients may use."""

    name: str
    """The model's name in their requests."""
    id: str
    """The name of its prepared file: `GenerationOptions.adapter_id`."""
    path: str
    """The folder that it was made of."""


class DraftCounts(msgspec.Struct, array_like=True, frozen=True):
    """What came of the ids that were proposed for a sequence so far. Sent for requests with a predicted output."""

    index: int
    """Index of its entry in the lists of the message."""
    num_accepted: int
    num_rejected: int


# ------------------------------------------------------------------------------------------ to several of the stages


class Abort(Message, frozen=True, tag="abort"):
    """To ingest and schedule: end this request, or one sequence of it. Idempotent; may arrive before its request."""

    request_id: int
    attempt: int
    index: int = -1
    """The sequence to end; -1 ends all."""
    finish: int = Finish.ABORT
    """The `Finish` of its closing. Detokenize sends STOP when it has found a stop string."""


class Release(Message, frozen=True, tag="release"):
    """Slabs of the receiver's arena that the sender has read: parallel lists."""

    offsets: list[int]
    generations: list[int]
    reader: str
    """The sender. A slab is free when all its readers have released it, or have died."""


# ------------------------------------------------------------------------------------- from the supervisor to a stage


FLOAT_FORMATS = ("bf16", "f32", "")


class Backend(msgspec.Struct, array_like=True, frozen=True):
    """What decides the bits of an executor's logits, besides the model. A stream continues exactly only at an executor
    with an equal one, and only if both are batch-invariant."""

    kernels: str = ""
    """An instruction set of the CPU library, `torch`, or `cuda`. Those of several ranks that differ are joined by +."""
    code: str = ""
    """A digest of the kernels: sources of the CPU library; for torch, its version and the kind of CPU or GPU."""
    dtype: str = ""
    weights: str = ""
    """Formats of the weight matrices, such as `q4_1+q8_0`."""
    activations: str = ""
    kv_dtype: str = ""

    def __str__(self) -> str:
        """One line for people and for comparisons; empty if nothing is known."""
        values = msgspec.structs.asdict(self)
        return " ".join(f"{name}={value}" for name, value in values.items()) if any(values.values()) else ""

    @classmethod
    def of_ranks(cls, ranks: Collection["Backend"]) -> "Backend":
        """That of an executor with these ranks."""
        found = [msgspec.structs.astuple(one) for one in ranks]
        return cls(*("+".join(sorted(set(values) - {""})) for values in zip(*found, strict=True)))


MAX_RUNS_BEYOND = 2
"""Runs as in `ExecuteFacts.max_whole_run` that a step may have beyond its limit of tokens."""


class ExecuteFacts(msgspec.Struct, array_like=True, frozen=True):
    """Facts that the executor finds out while it starts."""

    num_blocks: int
    block_size: int
    max_model_len: int
    """Longest sequence that this server accepts: the smallest limit of the model, the settings and the KV memory."""
    vocab_size: int
    num_swap_blocks: int = 0
    """Capacity of its swap segment in blocks."""
    hidden_size: int = 0
    """Numbers of an embedding, or of the logits of a prompt: the width of the model's pooler."""
    max_num_prefill_tokens: int = 0
    """The most tokens of a step in which no row decodes; 0 leaves it to the setting."""
    weight_formats: str = ""
    """Formats of the weight matrices, such as `q4_1+q8_0` or `bf16`."""
    kv_dtype: str = ""
    """The type of the KV cache: `bfloat16`, `float32` or `int8`."""
    kv_groups: list[KVGroup] = []
    """Groups of layers with block tables of their own; empty for one that keeps all positions."""
    num_speculative_tokens: int = 0
    """Ids that it can propose for a row and verify in one step; 0 without speculative decoding."""
    max_num_drafts: int = 0
    """The same for all rows of a step together."""
    eos_ids: list[int] = []
    """The model's end-of-sequence ids."""
    max_num_top: int = 0
    """The most top logprobs of a record; 0 if any number is possible."""
    is_batch_invariant: bool = True
    """Whether ids and logprobs are the same in any batch and any chunks. If not, a stream that continues after a crash
    may get other ids from there on than it would have had."""
    backend: Backend = Backend()
    """What computes. That of a successor is the same."""
    num_state_slots: int = 0
    """Slots for the states of a model with recurrent layers; 0 for others."""
    num_swap_state_slots: int = 0
    """Slots of its swap segment."""
    state_tokens: int = 0
    """Tokens whose keys and values have the size of a slot."""
    generates: bool = True
    """Whether it samples ids. If not, a text may have `max_model_len` ids, and one without meaning follows it."""
    is_encoder: bool = False
    """Each text is computed whole, in a step of at most `max_num_prefill_tokens` tokens, and nothing is kept of it."""

    block_bytes: int = 0
    """Bytes of a KV block of one rank; 0: not known."""
    slot_bytes: int = 0
    """The same of a slot for the states."""
    num_encoder_rows: int = 0
    """Rows of the encoder cache, which no media item may exceed; 0: the model takes no media."""
    max_whole_run: int = 0
    """The most positions of a run of media whose positions see each other, so that one step computes all that are
    left of it. A step may have MAX_RUNS_BEYOND beyond its limit of tokens. 0: they see only what is before them."""

    @property
    def quantization(self) -> str:
        """The formats of the quantized matrices, such as `q4_1+q8_0`; `none` without any."""
        quantized = [name for name in self.weight_formats.split("+") if name not in FLOAT_FORMATS]
        return "+".join(sorted(quantized)) or "none"


class Start(Message, frozen=True, tag="start"):
    """All stages are ready: begin. The first message that a stage receives."""

    facts: ExecuteFacts


class Ping(Message, frozen=True, tag="ping"):
    """Answered with `Pong` by the stage's ordinary loop, so an answer proves that the loop runs."""

    nonce: int


class Stop(Message, frozen=True, tag="stop"):
    """Exit now with code 0. Sent in flow order, after the stages before have exited."""


Control = Start | Ping | Stop


class ExpectGrammars(Message, frozen=True, tag="expect_grammars"):
    """From ingest, which checks the first grammar; forwarded by schedule to the executor: requests with grammars are
    going to come, so it starts the process that computes their masks. Without this message, the first one would wait
    for it; so it may be lost, or come again."""


class Adapters(Message, frozen=True, tag="adapters"):
    """From the supervisor: all LoRA adapters that clients may use from now on."""

    adapters: list[Adapter]
