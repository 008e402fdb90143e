"""The messages of a chat as clients write them, and the other fields of requests with a chat."""

import re
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Raw

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The API's roles. Templates may take others."""
ROLE = re.compile("[a-zA-Z0-9_.-]{1,64}")
MAX_ID_CHARS = 256


class ImageUrl(msgspec.Struct, omit_defaults=True):
    url: Annotated[str, Meta(description="A data: URL with base64: JPEG, PNG, WebP, GIF (the first frame) or BMP.")]
    detail: Annotated[str, Meta(description="auto, low or high, which make no difference yet.")] | None = None


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: Annotated[
        str, Meta(description="text; in a user's or tool's message also image_url; in an assistant's also refusal")
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str | ImageUrl, Meta(description="With type image_url; a string is its url.")] | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON text")]


class CustomCall(msgspec.Struct):
    name: str
    input: str


class ToolCallParam(msgspec.Struct, omit_defaults=True):
    function: FunctionCall | None = None
    id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="May be missing if the results are in order.")] | None
    ) = None
    type: str = "function"
    custom: Annotated[CustomCall, Meta(description="With type custom.")] | None = None


class MessageParam(msgspec.Struct, omit_defaults=True):
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


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages = Annotated[list[MessageParam], Meta(min_length=1)]
OBJECTS: dict[str, Any] = {"type": ["array", "null"], "items": {"type": "object"}}
_NAMED: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def _choice_schema(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": [kind]}, kind: value}, "required": ["type", kind]}


NAMED_CHOICES = [_choice_schema(kind, _NAMED) for kind in ("function", "custom")]
_ALLOWED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": {"anyOf": NAMED_CHOICES}},
    },
    "required": ["mode", "tools"],
}
Tools = Annotated[
    Raw, Meta(description="Functions and custom tools that the model may call.", extra_json_schema=OBJECTS)
]
ToolChoice = Annotated[
    Raw,
    Meta(
        description="An object with a tool's name requires a call of that tool; allowed_tools restricts the tools.",
        extra_json_schema={
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                *NAMED_CHOICES,
                _choice_schema("allowed_tools", _ALLOWED),
            ]
        },
    ),
]
Documents = Annotated[Raw, Meta(description="Objects for the chat template.", extra_json_schema=OBJECTS)]
Kwargs = Annotated[
    Raw,
    Meta(description="Further variables for the chat template.", extra_json_schema={"type": ["object", "null"]}),
]


class Conversation(Protocol):
    """A body with a chat."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Raw
    tool_choice: Raw
    parallel_tool_calls: bool | None
    documents: Raw
    chat_template_kwargs: Raw
    reasoning_effort: ReasoningEffort | None
    chat_template: Raw
