"""The parts of a request: its prompt, the options of its generation, and how ingest prepares it."""

from enum import IntEnum
from typing import Literal

import msgspec

from pipeline.shm.arrays import Array


class Pooling(IntEnum):
    """How a prompt's hidden states, after the last norm, become a vector. The names are those of `PoolingKind`
    (pipeline/runtime/model/pooler.py), in capitals."""

    NONE = 0
    MEAN = 1
    LAST = 2
    CLS = 3
    MAX = 4
    MEAN_SQRT_LEN = 5
    WEIGHTED_MEAN = 6
    ALL = 7
    """A vector for each token."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """The client's constraint on the output, as the client gave it. Ingest compiles it."""

    kind: str
    """json_object, json_schema, closed_schema (objects have no properties except those it names), regex, choice,
    grammar or structural_tag; or calls, of tools. With the prefix `compact_`, the JSON of an object, a schema or a tag
    has no white space"""
    source: str = ""
    """JSON text of a schema, of an array of strings, of a structural tag, or of a `LarkGrammar`
    (pipeline/text/formats); a pattern; a grammar"""
    param: str = ""
    """The field of the request, for errors."""


BEGIN = -1
"""In a run of bad words: the place before the first id of the output."""


class ReasoningBudget(msgspec.Struct, array_like=True, frozen=True):
    """A limit of a reply's reasoning. Ingest makes it (pipeline/text/formats/reasoning_budget.py), and execute's mask
    worker enforces it.

    Marks are in UTF-8, with the byte 0xFF before each special token, which no text has.
    """

    num_tokens: int
    """Output ids of reasoning; then it is ended. 0 ends it at once."""
    starts: list[bytes]
    """Marks that open the reasoning."""
    ends: list[bytes]
    """Marks that end it."""
    closing_ids: bytes
    """int32; what ends it if the model has not: the message and the end mark."""
    is_open: bool
    """The reply begins within the reasoning."""
    anywhere: bool = False
    """Reasoning may be opened again later; otherwise only at the beginning of the reply."""
    ends_now: bool = False
    """It is ended behind the ids that are known when a row begins, of which the last may be the first of
    `closing_ids`."""


class GenerationOptions(msgspec.Struct, array_like=True, frozen=True):
    """How output is generated from a prompt.

    The gateway's parsing builds it, and ingest completes it (`max_tokens`, `bad_words_ids`, `compiled_grammar`).
    `Submit`, `Admit`, `Open` and `RowAdd` hold it whole. A new request field is added here, in parsing, and in the
    stage that uses it.
    """

    n: int = 1
    """Sequences to generate."""
    max_tokens: int | None = None
    """Maximum number of output ids. None: as many as fit, until ingest knows how many. 0: none; `Accepted` closes the
    request, and schedule never gets it."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """u64. Sequence i of n samples with a key derived from (seed, i)."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. See kernels/sampling/penalties.py, also for the next two."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: list[int] = []
    """Ids whose logits get a bias, each at most once."""
    bias_values: list[float] = []
    """Parallel: the biases."""
    allowed_ids: bytes = b""
    """int32, ascending; empty allows all"""
    bad_words: list[str] = []
    """Texts that the output must not contain; ingest replaces them by `bad_words_ids`."""
    bad_words_ids: list[list[int]] = []
    """Runs of ids that the output never contains: the last id of a run is not sampled after the others. The first may
    be BEGIN."""
    min_tokens: int = 0
    """No stop string, stop id or end-of-sequence id ends the output before it has this many ids."""
    stop: list[str] = []
    """Stop strings. The text ends before the first match."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """The text ends behind the stop string, not before it."""
    skip_special_tokens: bool = True
    num_logprobs: int = -1
    """Each output id has a token output with its logprob and this many top logprobs; -1: no token outputs. Logprobs
    are those of the model's own distribution: before temperature, filters, penalties and masks."""
    num_prompt_logprobs: int = -1
    """The same for the ids of the prompt, all but the first."""
    with_pieces: bool = False
    """The gateway gets the bytes of each id in a token output."""
    pooling: int = Pooling.NONE
    """If it is set, one id is sampled, which has no meaning, and its token output is what the model's pooler makes of
    the prompt: an embedding, or logits of labels; with `Pooling.ALL`, those of each token of the prompt."""
    grammar: Grammar | None = None
    """The client's constraint on the output; ingest replaces it by `compiled_grammar`."""
    compiled_grammar: str = ""
    """The grammar of the output in llguidance's own form (JSON or Lark); empty allows anything."""
    priority: int = 0
    """Lower goes first if the scheduler's policy is `priority`."""
    cache_salt: str = ""
    """Only prompts with the same salt share KV blocks. With API keys it is the client's own salt within the scope of
    its key (`api_keys.scoped_salt`)."""
    logprob_token_ids: list[int] = []
    """If there are any, the token outputs of output ids have the logprobs of these `num_logprobs` ids, in this order,
    instead of the top logprobs."""

    prediction: str = ""
    """A text that the client expects in the output; ingest replaces it by `predicted_ids`."""
    predicted_ids: bytes = b""
    """int32; ids of that text. Speculative decoding proposes what follows in them; they change no output."""
    adapter_id: str = ""
    """The LoRA adapter that the model is changed by: the name of its prepared file, see pipeline/lora. Empty: none."""

    use_beam_search: bool = False
    """The output is the best `n` sequences that a beam search of width `n` finds, the best first."""
    length_penalty: float = 1.0
    """Of beam search: a sequence's score is the sum of its ids' logprobs, divided by length ** length_penalty."""
    early_stopping: bool | Literal["never"] = False
    """Of beam search: true ends it when it has found n sequences; false if none of its beams has a better score at its
    present length; "never" if none can get one."""

    repeats_received: bool = False
    """If the request comes with output ids: detokenize sends their text, too."""

    with_special_spans: bool = False
    """detokenize says where special tokens are in the text, which has them: see pipeline/text/special_spans.py."""

    segment_start: int = 0
    """The first position of the prompt whose token has type 1: the second text of a pair. 0: all have type 0."""

    thinking_token_budget: int | None = None
    """The most output ids of reasoning in the reply to a chat; -1: no limit; None: the server's. Ingest makes
    `reasoning_budget` of it."""
    reasoning_budget_message: str | None = None
    """A text that the reasoning ends with if its budget is used; None: the server's."""
    reasoning_budget: ReasoningBudget | None = None
    reasoning_control: bool = False
    """The client may end the reasoning of the running request: there is a `reasoning_budget` even without a limit."""

    @property
    def has_masks(self) -> bool:
        """Whether the mask worker says which ids may be sampled."""
        return bool(self.compiled_grammar) or self.reasoning_budget is not None

    @property
    def needs_full_prefill(self) -> bool:
        """Whether each sequence must compute every position of the prompt in one go: nothing comes from the prefix
        cache, and a preempted prefill starts again from the beginning. What is made of the last position alone needs no
        others."""
        return self.num_prompt_logprobs >= 0 or self.pooling not in (Pooling.NONE, Pooling.LAST)


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
    is_cache_mark: bool = False
    """The client says that other prompts go on in another way behind this message (Anthropic's `cache_control`)."""
    image_offsets: list[int] = []
    """For each image of the message, in order: how many of `parts` are before it."""


class EncodedImage(msgspec.Struct, array_like=True, frozen=True):
    """An image as the client sent it: ingest decodes it."""

    data: bytes
    """JPEG, PNG, WebP, GIF or BMP"""
    param: str
    """The field of the request, for errors."""
    detail: str = ""


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
    pair: str | None = None
    """A second text: the model's template of pairs makes one prompt of both, or else the tokenizer joins them."""
    template_kwargs: str = ""
    """JSON text: an object of variables for the template of pairs."""


class IdsPrompt(msgspec.Struct, array_like=True, frozen=True, tag="ids"):
    ids: Array
    """int32"""


Prompt = ChatPrompt | TextPrompt | IdsPrompt

KEY_BYTES = 16
"""Of a media item's key."""


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An image in a prompt. An encoder makes rows of it, which take the place of embeddings at some positions of the
    prompt; the ids there are the model's placeholders."""

    key: bytes
    """`KEY_BYTES` bytes: equal keys mean equal rows."""
    runs: list[tuple[int, int]]
    """(offset, length) of each run of placeholders, ascending. The rows follow one another in this order. Items are in
    the order of the prompt, and a run of one never lies between those of another."""
    grid: list[int]
    """How the pixels are arranged, as the model family's encoder defines it."""
    pixels: Array
    """uint8"""
    shape: list[int] = []
    """Of the pixels."""

    @property
    def num_rows(self) -> int:
        return sum(length for _, length in self.runs)


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
    """Keep only this many ids; 0 keeps all, -1 as many as fit into the model's context."""
    with_pieces: bool = False
    with_tail: bool = False
    """How the reply to a chat begins: inside of its reasoning, behind it, or before it."""
    truncates_right: bool = False
    """`truncate` keeps the first ids, not the last."""
    lowers_max_tokens: bool = False
    """If `max_tokens` exceeds what the context has left, generate that many instead of rejecting the request."""
