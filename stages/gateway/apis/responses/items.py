"""Items of conversations: messages, function calls, their outputs, and reasoning. Pure.

`Item` is what a response returns, stores and lists. `InputItem` is an entry of the field `input`, which clients may
write in several ways; `item_of` checks it and converts it.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.client.protocol.conversation import MAX_ID_CHARS
from pipeline.stages.gateway.errors import invalid, shown, unsupported
from pipeline.stages.gateway.parsing.chat.content_parts import Audio, Document, Image, PartTypes, Video
from pipeline.stages.gateway.replies.logprobs import TokenLogprob

ROLES = ("user", "assistant", "system", "developer")
Status = Literal["in_progress", "completed", "incomplete"]
MAX_ITEM_ID_CHARS = 128


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: Annotated[list[Any], Meta(description="Always empty.")] = []
    logprobs: Annotated[list[TokenLogprob], Meta(description="With include: message.output_text.logprobs.")] = []


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: Annotated[str, Meta(description="A data: URL with base64.")]
    detail: Annotated[str, Meta(description="auto, low or high, which make no difference yet.")] = "auto"


ToolOutput = str | list[InputText | InputImage]
"""What a tool returned: a list if an image is in it."""


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: str
    status: Status
    content: list[OutputText | InputText | InputImage | Refusal]


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON text, as the model wrote it.")]
    status: Status
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | UnsetType = UNSET


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: ToolOutput
    status: Status


class CustomToolCallOutputItem(msgspec.Struct, tag_field="type", tag="custom_tool_call_output"):
    id: str
    call_id: str
    output: ToolOutput
    status: Status


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: Annotated[list[SummaryText], Meta(description="Empty in output: the content has the reasoning.")]
    content: list[ReasoningText]
    status: Status


CallItem = FunctionCallItem | CustomToolCallItem
CallOutputItem = FunctionCallOutputItem | CustomToolCallOutputItem
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem

C = TypeVar("C", FunctionCallItem, CustomToolCallItem)
R = TypeVar("R", FunctionCallOutputItem, CustomToolCallOutputItem)

PREFIXES: dict[type, str] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    CustomToolCallItem: "ctc",
    CustomToolCallOutputItem: "ctco",
    ReasoningItem: "rs",
}
"""Of the ids of items"""


def num_parts(items: Iterable[Item]) -> int:
    """Number of items and of the parts of their contents: a prompt has about a token for each at least."""
    return sum(map(_num_parts, items))


def _num_parts(item: Item) -> int:
    match item:
        case MessageItem():
            return max(1, len(item.content))
        case ReasoningItem():
            return max(1, len(item.content), len(item.summary))
        case FunctionCallOutputItem(output=list(parts)) | CustomToolCallOutputItem(output=list(parts)):
            return len(parts)
    return 1


def item_id(kind: type, seed: str) -> str:
    """A unique id, which is the same in a replay."""
    return f"{PREFIXES[kind]}_{hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()}"


# ------------------------------------------------------------------------------------------------------------ input


LEFT_OUT_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items of tools that are left out (see tools.py): no chat has them, so they are left out, too."""


class InputPart(msgspec.Struct):
    """A part of a message, of reasoning, or of a function's output"""

    type: (
        Annotated[
            str, Meta(description="input_text, input_image, output_text, refusal, reasoning_text or summary_text")
        ]
        | None
    ) = None
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str, Meta(description="With type input_image: a data: URL with base64.")] | None = None
    detail: Annotated[str, Meta(description="With type input_image: auto, low or high.")] | None = None
    file_id: Annotated[str, Meta(description="Not supported: the server stores no files.")] | None = None


_PARTS = PartTypes(
    {
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
        "reasoning_text": "text",
        "summary_text": "text",
    },
    {
        "input_image": Image,
        "computer_screenshot": Image,
        "input_audio": Audio,
        "input_video": Video,
        "input_file": Document,
    },
)
_OF_INPUT, _OF_REASONING, _OF_SUMMARIES = ("input_text", "output_text"), ("reasoning_text",), ("summary_text",)
_OF_OUTPUT = (*_OF_INPUT, "refusal")
"""Types of text that parts may have: of a user's messages and of a tool's output, of reasoning, of summaries, and of an
assistant's messages"""

ItemId = Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)]


class InputItem(msgspec.Struct):
    """An entry of `input`"""

    type: (
        Annotated[
            str,
            Meta(
                description="message (the default if there is a role), function_call, function_call_output, "
                "custom_tool_call, custom_tool_call_output, reasoning, or item_reference: the id of an item of a "
                "stored response. web_search_call and other calls of tools that the model does not get are ignored."
            ),
        ]
        | None
    ) = None
    id: ItemId | None = None
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})] | None = None
    content: str | list[InputPart] | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    name: str | None = None
    namespace: Annotated[str, Meta(description="Of a call's tool.")] | None = None
    arguments: Annotated[str | dict[str, Any], Meta(description="JSON text; an object in items that are ignored")] | (
        None
    ) = None
    input: Annotated[str, Meta(description="Of a custom tool's call.")] | None = None
    output: (
        Annotated[
            str | list[InputPart] | dict[str, Any],
            Meta(description="What the tool returned; an object in items that are ignored"),
        ]
        | None
    ) = None
    summary: list[InputPart] | None = None
    encrypted_content: Annotated[str, Meta(description="No effect.")] | None = None
    status: str | None = None


def item_of(index: int, item: InputItem, seed: str) -> Item | None:
    """Check an entry of `input`. Returns None if it refers to a stored item. `seed` is for the id of an item without
    one. Raises ApiError."""
    at = f"input[{index}]"
    match _type_of(at, item):
        case "message":
            return _message(at, item, seed)
        case "function_call":
            return _call(at, item, seed, FunctionCallItem, "arguments")
        case "custom_tool_call":
            return _call(at, item, seed, CustomToolCallItem, "input")
        case "function_call_output":
            return _call_output(at, item, seed, FunctionCallOutputItem)
        case "custom_tool_call_output":
            return _call_output(at, item, seed, CustomToolCallOutputItem)
        case "reasoning":
            return _reasoning(at, item, seed)
        case "item_reference":
            if item.id is None:
                raise _required(f"{at}.id")
            return None
        case other:
            what = f"'{shown(other)}' is not one of message, function_call, function_call_output, custom_tool_call"
            raise unsupported(f"{at}.type", f"{what}, custom_tool_call_output, reasoning and item_reference")


def _type_of(at: str, item: InputItem) -> str:
    if item.type is not None:
        return item.type
    if item.role is not None:
        return "message"
    if item.id is not None:
        return "item_reference"
    raise _required(f"{at}.role")


def _message(at: str, item: InputItem, seed: str) -> MessageItem:
    if item.role is None:
        raise _required(f"{at}.role")
    if item.role not in ROLES:
        raise invalid(f"{at}.role", f"'{at}.role' must be one of {', '.join(ROLES)}", "invalid_value")
    is_output = item.role == "assistant"
    parts: list[OutputText | InputText | InputImage | Refusal] = []
    match item.content:
        case None:
            raise _required(f"{at}.content")
        case str(text):
            parts.append(OutputText(text) if is_output else InputText(text))
        case given:
            for j, part in enumerate(given):
                where = f"{at}.content[{j}]"
                if part.type == "input_image" and not is_output:
                    parts.append(_image(part))
                    continue
                text = _PARTS.text_of(where, part, _OF_OUTPUT if is_output else _OF_INPUT)
                if part.type == "refusal":
                    parts.append(Refusal(text))
                else:
                    parts.append(OutputText(text) if is_output else InputText(text))
    return MessageItem(item.id or item_id(MessageItem, seed), item.role, "completed", parts)


def _call(at: str, item: InputItem, seed: str, kind: type[C], text: str) -> C:
    for name in ("call_id", "name", text):
        if getattr(item, name) is None:
            raise _required(f"{at}.{name}")
    written = getattr(item, text)
    if not isinstance(written, str):
        raise invalid(f"{at}.{text}", f"'{at}.{text}' must be a string", "invalid_type")
    found, namespace = item.id or item_id(kind, seed), UNSET if item.namespace is None else item.namespace
    return kind(found, item.call_id or "", item.name or "", written, "completed", namespace)


def _call_output(at: str, item: InputItem, seed: str, kind: type[R]) -> R:
    if item.call_id is None:
        raise _required(f"{at}.call_id")
    if item.output is None:
        raise _required(f"{at}.output")
    found = item.id or item_id(kind, seed)
    return kind(found, item.call_id, _output(f"{at}.output", item.output), "completed")


def _reasoning(at: str, item: InputItem, seed: str) -> ReasoningItem:
    summary = [
        SummaryText(_PARTS.text_of(f"{at}.summary[{j}]", part, _OF_SUMMARIES))
        for j, part in enumerate(item.summary or ())
    ]
    content = [ReasoningText(item.content)] if isinstance(item.content, str) else []
    if isinstance(item.content, list):
        content = [
            ReasoningText(_PARTS.text_of(f"{at}.content[{j}]", part, _OF_REASONING))
            for j, part in enumerate(item.content)
        ]
    return ReasoningItem(item.id or item_id(ReasoningItem, seed), summary, content, "completed")


def _output(at: str, output: str | list[InputPart] | dict[str, Any]) -> ToolOutput:
    if isinstance(output, str):
        return output
    if isinstance(output, dict):
        raise invalid(at, f"'{at}' must be a string or an array", "invalid_type")
    parts = [
        _image(part) if part.type == "input_image" else InputText(_PARTS.text_of(f"{at}[{j}]", part, _OF_INPUT))
        for j, part in enumerate(output)
    ]
    texts = [part.text for part in parts if isinstance(part, InputText)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _image(part: InputPart) -> InputImage:
    return InputImage(part.image_url or "", part.detail or "auto")


def _required(param: str) -> Exception:
    return invalid(param, f"'{param}' is required")
