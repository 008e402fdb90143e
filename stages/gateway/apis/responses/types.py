"""Types of replies of /v1/responses: the response, its events, and lists of its items."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from pipeline.stages.gateway.apis.responses.items import Item, OutputText, ReasoningText
from pipeline.stages.gateway.replies.logprobs import TokenLogprob

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
"""Items in a list"""
MAX_PAGE_BYTES = 1024 * 1024
"""Of the items in a list, as they are in memory; one item may have more."""
MAX_NUMBER_DIGITS = 9
"""Of a `sequence_number` in a query"""

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class InputTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="Found in the prefix cache.")]
    cache_write_tokens: Annotated[int, Meta(description="Always 0: writes to the prefix cache are not counted.")] = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: Annotated[int, Meta(description="Tokens up to the end of the reasoning.")]


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct):
    reason: Annotated[str, Meta(extra_json_schema={"enum": ["max_output_tokens"]})]


class ReasoningEcho(msgspec.Struct):
    effort: str | None
    summary: str | None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response"""

    id: str
    object: Annotated[str, Meta(description="response")] = "response"
    created_at: Annotated[int, Meta(description="Unix time, in seconds.")]
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Annotated[str, Meta(description="default")] = "default"
    store: bool
    temperature: float
    text: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    tool_choice: Annotated[Raw, Meta(extra_json_schema={"type": ["string", "object"]})]
    tools: Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of POST /v1/responses. Each type has some of the fields."""

    type: str
    sequence_number: Annotated[int, Meta(description="Counts the events of the stream from 0.")] = 0
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class ResponseDeleted(msgspec.Struct):
    """The reply to DELETE"""

    id: str
    object: Annotated[str, Meta(description="response")] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of a response's input items"""

    object: Annotated[str, Meta(description="list")] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
