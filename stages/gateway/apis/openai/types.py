"""Types of replies to chats and completions in OpenAI's shapes, complete and as stream events.

`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs`, `kv_transfer_params` and `metrics` are vLLM's
additions, in its places: details of a prompt are in the reply of a chat, and in each choice of a completion. As in
vLLM, fields that a request did not ask for are null. UNSET fields are left out.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.stages.gateway.open_requests.timings import Timings
from pipeline.stages.gateway.replies.logprobs import ChatLogprobs, PromptLogprob, TextLogprobs
from pipeline.stages.gateway.replies.request_metrics import RequestMetrics

StopReason = Annotated[str | int, Meta(description="The stop string or the id of stop_token_ids that ended it.")]
FinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", "abort"]})]
Assistant = Annotated[str, Meta(extra_json_schema={"enum": ["assistant"]})]
Role = Annotated[
    str, Meta(description="assistant; without a generation prompt, the role of the request's last message.")
]
TokenIds = Annotated[list[int], Meta(description="With return_token_ids.")]
PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Meta(description="With prompt_logprobs: for each token, by id; null for the first."),
]

Metrics = Annotated[RequestMetrics, Meta(description="If gateway.per_request_metrics is set, of a single choice.")]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="Found in the prefix cache.")]


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: (
        Annotated[
            int,
            Meta(description="With prediction: tokens that speculative decoding proposed and that are in the output."),
        ]
        | UnsetType
    ) = UNSET
    rejected_prediction_tokens: (
        Annotated[int, Meta(description="With prediction: proposed tokens that are not in the output.")] | UnsetType
    ) = UNSET
    reasoning_tokens: (
        Annotated[
            int,
            Meta(description="Of a model that reasons: tokens up to the end of the reasoning, of completion_tokens."),
        ]
        | UnsetType
    ) = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: (
        Annotated[PromptTokensDetails, Meta(description="Not in the events of a stream before the last one.")]
        | UnsetType
    ) = UNSET
    completion_tokens_details: (
        Annotated[CompletionTokensDetails, Meta(description="With prediction, and of a model that reasons.")]
        | UnsetType
    ) = UNSET


class ReplyFunction(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON text, as the model wrote it.")]


class ReplyCustom(msgspec.Struct):
    name: str
    input: str


class ReplyToolCall(msgspec.Struct):
    id: str
    function: ReplyFunction | UnsetType
    type: str = "function"
    custom: Annotated[ReplyCustom, Meta(description="With type custom, instead of function.")] | UnsetType = UNSET


class ReplyMessage(msgspec.Struct):
    content: Annotated[str, Meta(description="null if there are only tool calls or reasoning.")] | None
    role: Role = "assistant"
    refusal: None = None
    tool_calls: list[ReplyToolCall] | UnsetType = UNSET
    reasoning_content: Annotated[str, Meta(description="The reasoning before the content.")] | UnsetType = UNSET
    reasoning: Annotated[str, Meta(description="Same as reasoning_content.")] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    finish_reason: FinishReason
    stop_reason: StopReason | None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds | None = None


class ChatReply(msgspec.Struct):
    """POST /v1/chat/completions"""

    id: str
    object: Annotated[str, Meta(description="chat.completion")]
    created: Annotated[int, Meta(description="Unix time, in seconds.")]
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: TokenIds | None = None
    kv_transfer_params: None = None
    metrics: Metrics | None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: Annotated[str, Meta(description="Empty, and then all of it.")]


class ToolDelta(msgspec.Struct):
    index: Annotated[int, Meta(description="Index of the tool call in the choice.")]
    id: str | UnsetType
    type: str | UnsetType
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Role | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a stream of POST /v1/chat/completions"""

    id: str
    object: Annotated[str, Meta(description="chat.completion.chunk")]
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType | None = UNSET
    """In the first event of each choice"""
    metrics: Metrics | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType | None = UNSET
    logprobs: TextLogprobs | None = None
    token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    """Not in a stream"""
    prompt_token_ids: TokenIds | None = None


class TextReply(msgspec.Struct):
    """POST /v1/completions; an event of its stream has the same shape."""

    id: str
    object: Annotated[str, Meta(description="text_completion")]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: UnsetType | None = UNSET
    """Not in a stream"""
    metrics: Metrics | UnsetType | None = UNSET
