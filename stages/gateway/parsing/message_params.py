"""The messages of a chat as clients write them. Pure."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The API's roles. Templates may take others."""
ROLE = re.compile("[a-zA-Z0-9_.-]{1,64}")
MAX_ID_CHARS = 256


class ContentPart(msgspec.Struct):
    type: Annotated[str, Meta(description="text; in an assistant's message also refusal")]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON text")]


class CustomCall(msgspec.Struct):
    name: str
    input: str


class ToolCallParam(msgspec.Struct):
    function: FunctionCall | None = None
    id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="May be missing if the results are in order.")] | None
    ) = None
    type: str = "function"
    custom: Annotated[CustomCall, Meta(description="With type custom.")] | None = None


class MessageParam(msgspec.Struct):
    role: Annotated[
        str,
        Meta(
            description=f"{', '.join(ROLES)}, or another role that the model's chat template takes.",
            extra_json_schema={"pattern": f"^{ROLE.pattern}$"},
        ),
    ]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: (
        Annotated[str, Meta(description="In a tool's message: the id of the call that it answers.")] | None
    ) = None
    reasoning_content: Annotated[str, Meta(description="In an assistant's message: its reasoning.")] | None = None
    reasoning: Annotated[str, Meta(description="As reasoning_content.")] | None = None
    refusal: str | None = None
    function_call: Raw = Raw()
    audio: Raw = Raw()
