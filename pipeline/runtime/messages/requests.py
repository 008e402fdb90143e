"""The parts of a request: its prompt, how its tokens are sampled, and how its ids become text."""

from enum import IntEnum

import msgspec

from pipeline.shm.arrays import Array


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How tokens are sampled. Read by the executor only; schedule passes it on undecoded."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """u64, always set by the gateway. Sequence i of n samples with a key derived from (seed, i)."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    with_logprobs: bool = False
    """The record of each id has its log probability under the model's own distribution: before temperature, filters,
    penalties and masks."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. See kernels/penalties.py, also for the next two."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: list[int] = []
    """Ids whose logits get a bias, each at most once."""
    bias_values: list[float] = []
    """Parallel: the biases."""
    allowed_ids: bytes = b""
    """int32, ascending; empty allows all"""
    bad_words: list[list[int]] = []
    """Runs of ids that the output never contains: the last id of a run is not sampled after the others."""
    min_tokens: int = 0
    """The output has at least this many ids before one that ends it."""
    num_top: int = 0
    """The record of each id also has this many of the likeliest ids; see pipeline/runtime/logprob_records.py."""
    prompt_num_top: int = -1
    """Likewise for the ids of the prompt, all but the first; -1: no records of them."""
    pooling: int = 0
    """`Pooling`. One id is sampled, which has no meaning; its record is the prompt's embedding."""
    grammar: str = ""
    """The grammar of the output in llguidance's own form (JSON or Lark), checked by ingest; empty allows anything."""


class TextOptions(msgspec.Struct, array_like=True, frozen=True):
    """How ids become text. Read by detokenize only; schedule passes it on undecoded."""

    stop: list[str] = []
    """Stop strings. The text ends before the first match."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: list[int] = []
    """Only for `stop_reason`, which names the id that stopped the sequence. The executor does the stopping."""
    record_bytes: int = 0
    """Bytes of each id's record, see `Sampling`; 0: no records. The gateway gets the records of the ids that count."""
    num_top: int = 0
    """As in `Sampling`; likewise"""
    prompt_num_top: int = -1
    with_pieces: bool = False
    """The gateway gets the bytes of each id in a record."""
    min_tokens: int = 0
    """Stop strings that end within the text of the first `min_tokens` ids are ignored."""


class Pooling(IntEnum):
    """How a prompt's hidden states, after the last norm, become its embedding."""

    NONE = 0
    MEAN = 1
    LAST = 2


class ToolCall(msgspec.Struct, array_like=True, frozen=True):
    """A tool call in an assistant's message."""

    id: str
    name: str
    arguments: str
    """JSON text, as the client gave it"""


class ChatMessage(msgspec.Struct, array_like=True, frozen=True):
    role: str
    content: str | None
    """None if an assistant's message has only tool calls."""
    name: str | None = None
    parts: list[str] | None = None
    """The texts of `content`, if the client gave it in parts."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning: str | None = None
    """The reasoning before an assistant's `content`."""


class ChatPrompt(msgspec.Struct, array_like=True, frozen=True, tag="chat"):
    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The output continues the last message."""
    tools: str = ""
    """JSON text: the array of tools as the client gave it, checked by the gateway; empty: no tools."""
    tool_choice: str = "auto"
    """none, auto, required or named"""
    tool_name: str = ""
    """The tool that `named` names."""
    parallel_tool_calls: bool = True
    documents: str = ""
    """JSON text: an array for the template."""
    template_kwargs: str = ""
    """JSON text: an object of further variables for the template."""


class TextPrompt(msgspec.Struct, array_like=True, frozen=True, tag="text"):
    text: str


class IdsPrompt(msgspec.Struct, array_like=True, frozen=True, tag="ids"):
    ids: Array
    """int32"""


Prompt = ChatPrompt | TextPrompt | IdsPrompt

MAX_SHOWN_IDS = 2**18
"""Maximum number of prompt ids of a request that computes nothing, so that no answer delays the others for long."""


class PromptOptions(msgspec.Struct, array_like=True, frozen=True):
    """How ingest turns a prompt into ids, and which optional fields `Accepted` has."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. None: for texts, but not for chats, whose templates write their own."""
    any_length: bool = False
    """Nothing is computed from the prompt: it may be empty, or longer than the model's context."""
    with_text: bool = False
    with_token_strs: bool = False
    truncate: int = 0
    """Keep only this many of the last ids; 0 keeps all, -1 as many as fit into the model's context."""
    with_pieces: bool = False
    with_tail: bool = False
    """The end of a chat's text, which shows whether it opens the model's reasoning; see pipeline/text/formats."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """The client's constraint on the output, as the client gave it. Ingest turns it into `Sampling.grammar`."""

    kind: str
    """json_object, json_schema, closed_schema (objects have no properties except those it names), regex, choice,
    grammar or structural_tag; or calls, of tools. With the prefix `compact_`, the JSON of an object, a schema or a tag
    has no white space"""
    source: str = ""
    """JSON text of a schema, of an array of strings, of a structural tag, or of a `Written` (pipeline/text/formats); a
    pattern; a grammar"""
    param: str = ""
    """The field of the request, for errors."""
