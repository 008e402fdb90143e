"""Request bodies of the OpenAI API, and which of its fields must keep their neutral value here.

Fields that neither struct nor table names are ignored, as OpenAI's own clients and proxies expect. So are fields that
change nothing about the text: user, metadata, parallel_tool_calls, prompt_cache_key, safety_identifier ...
Null stands for a field's default everywhere.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pipeline.messages import MAX_SHOWN_IDS
from pipeline.protocol import MAX_SALT_CHARS, MAX_TIMEOUT_S

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128

Id = Annotated[int, Meta(ge=0, lt=2**31)]
MaxTokens = Annotated[int, Meta(ge=1, lt=2**31)]
BestOf = Annotated[int, Meta(ge=1, le=MAX_N)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """-1 and 0 are off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    seed: int | None = None
    """-2**63 .. 2**64 - 1"""
    stop: str | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    """The client's own name for it; a header, X-Request-Id, wins."""
    timings: bool | None = None
    """Ours: the reply says where its time went."""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """vLLM's: lower goes first"""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """vLLM's"""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Ours: from its arrival to its end"""


B = TypeVar("B", bound=msgspec.Struct)


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    """Wins over max_tokens, which it replaces in OpenAI's API."""
    add_generation_prompt: bool | None = None


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | Id | list[Id]]
    """A text, texts, ids, or lists of ids; not a mixture."""
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """0 only together with echo"""
    best_of: BestOf | None = None
    """Sequences that are generated, of which the n best are returned; by default n"""
    echo: bool | None = None


class ParamsBody(Body, kw_only=True):
    """A request that comes over ZeroMQ"""

    best_of: BestOf | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text or of a chat"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_SHOWN_IDS)] | None = None
    add_special_tokens: bool | None = None
    """By default those of a text are added, and those of a chat are left to its template."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[Id], Meta(max_length=MAX_SHOWN_IDS)]


NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI, both endpoints
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    # OpenAI, chat
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": ([], ["text"]),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # OpenAI, completions
    "suffix": ("",),
    # vLLM
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (False,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields the API knows and this server does not support: the values, besides null, at which they change nothing.
Any other value is an error, so that nobody gets text other than what they asked for without being told."""

CHAT_NEUTRAL = NEUTRAL | {"add_special_tokens": (False,), "best_of": (1,), "echo": (False,)}
COMPLETION_NEUTRAL = NEUTRAL | {"add_special_tokens": (True,), "max_completion_tokens": ()}
TOKENIZE_NEUTRAL = {
    name: NEUTRAL[name]
    for name in ("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "tools")
}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value changes nothing. To Python False is 0, but in this API 0 may ask for something: `logprobs: 0`
    wants the log-probabilities of the chosen tokens."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def with_unsupported(body: type[B], neutral: Mapping[str, tuple[Any, ...]]) -> type[B]:
    """A body that also takes the fields of a table, whatever their values, so that one pass over the bytes reads
    both."""
    fields = [(name, Any, None) for name in neutral]
    wider: type[Any] = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
    return wider
