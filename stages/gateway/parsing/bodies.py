"""Request bodies of the OpenAI API, and the fields of it that are not supported.

Fields in neither a struct nor a table are ignored, as OpenAI's clients and proxies expect. So are fields that don't
change the text: user, metadata, prompt_cache_key, safety_identifier ...
Null means a field's default everywhere.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.conversation import (
    Documents,
    Kwargs,
    MessageParam,
    Messages,
    ReasoningEffort,
    ToolChoice,
    Tools,
)
from pipeline.client.protocol.request import BestOf, MaxTokens, NumLogprobs, RequestFields
from pipeline.client.protocol.sampling import Id, ThinkingTokenBudget
from pipeline.runtime.messages import MAX_SHOWN_IDS


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[bool, Meta(description="true: an event with usage at the end.")] | None = None
    continuous_usage_stats: Annotated[bool, Meta(description="With include_usage: every event has usage.")] | None = (
        None
    )


class Body(RequestFields, kw_only=True):
    """Fields of both endpoints."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: (
        Annotated[bool, Meta(description="true: the reply has token_ids and prompt_token_ids.")] | None
    ) = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description='true: tokens in log probabilities are named "token_id:123".')] | None
    ) = None
    request_id: str | None = None
    """An id chosen by the client; the header X-Request-Id takes precedence."""


B = TypeVar("B", bound=msgspec.Struct)

NAME_ENDS = "x-name-ends"
"""Key in the JSON schema of a field with the model's name: what may follow it. The API's description replaces it."""


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    """Takes precedence over max_tokens, which it replaces in OpenAI's API."""
    echo: (
        Annotated[bool, Meta(description="true: the reply begins with the last message if it has the reply's role.")]
        | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, Meta(description="true: the reply continues the last message.")] | None = (
        None
    )
    tools: Tools = Raw()
    tool_choice: ToolChoice = Raw()
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one tool call in a reply.")] | None = None
    documents: Documents = Raw()
    chat_template_kwargs: Kwargs = Raw()
    chat_template: Raw = Raw()
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Annotated[bool, Meta(description="false: the reply has no reasoning.")] | None = None
    reasoning_budget_tokens: ThinkingTokenBudget | None = None
    """llama.cpp's name of thinking_token_budget, as the next one"""
    thinking_budget_tokens: ThinkingTokenBudget | None = None
    logprobs: Annotated[bool, Meta(description="true: the reply has the log probability of each token.")] | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, description="With logprobs: this many top logprobs for each token.")] | None
    ) = None


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | Id | list[Id]] | None = None
    """Required. A text, texts, ids, or lists of ids; not a mixture."""
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """0 only together with echo"""
    best_of: BestOf | None = None
    """Sequences that are generated, of which the n best are returned; by default n"""
    suffix: (
        Annotated[str, Meta(description="Text after the output. The model must have fill-in-the-middle tokens.")] | None
    ) = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text or of a chat"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_SHOWN_IDS)] | None = None
    continue_final_message: bool | None = None
    tools: Tools = Raw()
    tool_choice: ToolChoice = Raw()
    parallel_tool_calls: bool | None = None
    documents: Documents = Raw()
    chat_template_kwargs: Kwargs = Raw()
    chat_template: Raw = Raw()
    reasoning_effort: ReasoningEffort | None = None
    add_special_tokens: bool | None = None
    """By default those of a text are added, and those of a chat are left to its template."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[Id], Meta(max_length=MAX_SHOWN_IDS)]


MAX_ACCEPTED_BYTES = 256
"""No accepted value of an unsupported field is as long."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI, both endpoints
    # OpenAI, chat
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": ([], ["text"]),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("low", "medium", "high"),
    "web_search_options": (),
    # vLLM
    "ec_transfer_params": ({},),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields of the API that are not supported, and the values besides null that have no effect. Any other value is an
error, so that no field is silently ignored that changes the text."""

CHAT_UNSUPPORTED_FIELDS = UNSUPPORTED_FIELDS | {"best_of": (1,), "suffix": ("",)}
COMPLETION_UNSUPPORTED_FIELDS = UNSUPPORTED_FIELDS | {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "max_completion_tokens": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def has_no_effect(raw: Raw, accepted: tuple[Any, ...]) -> bool:
    """Whether the JSON of a field is missing, null or one of these values. In Python False equals 0, but here 0 has
    another type and may have a meaning."""
    text = bytes(raw)
    if not text or len(text) > MAX_ACCEPTED_BYTES:  # it is decoded only if it is short
        return not text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):  # such as a number that no float has
        return False
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted
    )


def with_unsupported(body: type[B], unsupported_fields: Mapping[str, tuple[Any, ...]]) -> type[B]:
    """Extend a body with the fields of a table, of any type, so that one pass reads both. They are not decoded: their
    values may be large, and almost all are refused."""
    fields = [(name, Raw, Raw()) for name in unsupported_fields]
    wider: type[Any] = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
    return wider
