"""Types of replies of Anthropic's Messages API, complete and as stream events."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from pipeline.stages.gateway.apis.openai.types import Assistant

STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn")
MessagesStopReason = Annotated[
    str,
    Meta(
        description="pause_turn: the request was aborted, or reached its deadline.",
        extra_json_schema={"enum": list(STOP_REASONS)},
    ),
]
StopSequence = Annotated[str, Meta(description="The stop sequence that ended it.")]
Index = Annotated[int, Meta(description="Index of the block in the content.")]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: Annotated[str, Meta(description="Empty.")] = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[
        Raw,
        Meta(
            description="Empty in a stream, and if the model did not write a JSON object.",
            extra_json_schema={"type": "object"},
        ),
    ]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct):
    input_tokens: Annotated[int, Meta(description="Prompt tokens that were not found in the prefix cache.")]
    cache_creation_input_tokens: Annotated[int, Meta(description="0.")]
    cache_read_input_tokens: Annotated[int, Meta(description="Prompt tokens found in the prefix cache.")]
    output_tokens: int


class MessageReply(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """POST /v1/messages"""

    id: str
    role: Assistant = "assistant"
    content: list[ContentBlock]
    model: str
    stop_reason: MessagesStopReason | None
    stop_sequence: StopSequence | None
    usage: MessagesUsage


class CountTokensReply(msgspec.Struct):
    """POST /v1/messages/count_tokens"""

    input_tokens: int


# ----------------------------------------------------------------------------------------------------------- events


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: Annotated[str, Meta(description="A piece of the JSON text, as the model wrote it.")]


class StopDelta(msgspec.Struct):
    stop_reason: MessagesStopReason
    stop_sequence: StopSequence | None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: Index
    content_block: ContentBlock


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """It has no effect."""


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: Index
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: Index


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)
