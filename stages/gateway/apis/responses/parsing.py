"""Parses the body of POST /v1/responses as a chat. Pure: what is stored comes as an argument."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from pipeline.client.protocol.generation import GenerationFields, JsonSchemaFormat, ResponseFormat
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.reply import CHAT
from pipeline.stages.gateway.apis.responses.body import (
    INCLUDE_LOGPROBS,
    INCLUDES,
    RESPONSES_UNSUPPORTED_FIELDS,
    ResponsesBody,
    TextConfig,
    renamed,
)
from pipeline.stages.gateway.apis.responses.fields import ResponseFields
from pipeline.stages.gateway.apis.responses.items import (
    LEFT_OUT_ITEMS,
    InputText,
    MessageItem,
    item_id,
    item_of,
)
from pipeline.stages.gateway.apis.responses.messages import messages_of
from pipeline.stages.gateway.apis.responses.reply import ResponsesDialect
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, parts_of, sized, sum_of
from pipeline.stages.gateway.apis.responses.tools import ChatTools, tools_json
from pipeline.stages.gateway.errors import ApiError, invalid, shown, unsupported
from pipeline.stages.gateway.parsing.bodies import ChatBody, with_unsupported
from pipeline.stages.gateway.parsing.build import check_num_messages, parsed_request_of, with_reply
from pipeline.stages.gateway.parsing.chat.conversation import chat_prompt
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits, shown_types
from pipeline.stages.gateway.parsing.token_detail_options import TokenDetailOptions, check_num_top

_bodies = msgspec.json.Decoder(with_unsupported(ResponsesBody, RESPONSES_UNSUPPORTED_FIELDS))
FORMATS = ("text", "json_object", "json_schema")
TO_CHATS = ("seed", "parallel_tool_calls", "chat_template_kwargs", "stream", "request_id", "priority", "cache_salt")
"""Fields that are the same in a chat, besides those of sampling."""


class Stored(Protocol):
    """The stored responses that a client may refer to. `is_on`: responses are stored."""

    is_on: bool
    why_off: str

    def size(self, response_id: str) -> "StoredSize":
        """The size of `conversation`, without a walk through it. Raises ApiError."""

    def conversation(self, response_id: str) -> list[SizedItem]:
        """The items before and of a response. Raises ApiError."""

    def item(self, param: str, item_id: str) -> SizedItem:
        """An item. Raises ApiError."""

    def check_size(self, param: str, num_bytes: int) -> None:
        """Raises ApiError if one request may not refer to items of this size together. `param` is the field that
        refers to the last one."""


class StoredSize(NamedTuple):
    """The size of a stored conversation, or of a part of it."""

    num_bytes: int = 0
    num_parts: int = 0
    """As `num_parts`"""


class Referred(msgspec.Struct, omit_defaults=True):
    """What a request took from the stored responses. It takes their place when the request is parsed again."""

    is_on: bool
    before: list[SizedItem] = []
    """The conversation that it continues."""
    items: dict[str, SizedItem] = {}
    """Those that it names, by id."""
    why_off: str = ""

    def size(self, _: str) -> "StoredSize":
        return StoredSize(sum_of(self.before), parts_of(self.before))

    def conversation(self, _: str) -> list[SizedItem]:
        return self.before

    def item(self, _: str, item_id: str) -> SizedItem:
        return self.items[item_id]

    def check_size(self, param: str, num_bytes: int) -> None:
        """It was checked."""


class ReadResponse(NamedTuple):
    """A body, without the conversation that it continues: that may be large even if the body is small."""

    body: ResponsesBody
    is_stored: bool
    new: list[SizedItem]
    """The field `input`"""
    num_parts: int
    """Of the whole conversation"""
    num_stored_bytes: int
    """Size of what the body refers to: the conversation, and items, each as often as it does."""


class ParsedResponse(NamedTuple):
    request: ParsedRequest
    items: list[SizedItem]
    """The conversation, to which the output will be added."""


def parse_response(body: bytes, limits: RequestLimits, stored: Stored, seed: str) -> ParsedResponse:
    """Read a body and what it names. `seed` makes the ids of new items unique. Raises ApiError."""
    return finish_response(read_response(body, limits, stored, seed), limits, stored)


def read_response(body: bytes, limits: RequestLimits, stored: Stored, seed: str) -> ReadResponse:
    """Read a body alone. Refuses a conversation with too many parts. Raises ApiError."""
    response: ResponsesBody = decode(_bodies, body, RESPONSES_UNSUPPORTED_FIELDS)
    _check(response)
    is_stored = _is_stored(response, stored)
    before = StoredSize() if response.previous_response_id is None else stored.size(response.previous_response_id)
    with _renamed_errors():
        new, num_stored_bytes = _new_items(response, limits, stored, seed, before)
        num_all = before.num_parts + parts_of(new)
        check_num_messages(num_all, limits)
    return ReadResponse(response, is_stored, new, num_all, num_stored_bytes)


def finish_response(read: ReadResponse, limits: RequestLimits, stored: Stored) -> ParsedResponse:
    """Check a body with the conversation that it continues. Raises ApiError."""
    response = read.body
    before = [] if response.previous_response_id is None else stored.conversation(response.previous_response_id)
    num_stored, items = len(before), before + read.new
    images = limits.images()
    messages = messages_of(response.instructions, [one.item for one in items], num_stored, images)
    tools = ChatTools(response.tools or ())
    chat = _chat(response, tools)

    def prompts() -> list[m.Prompt]:
        return [msgspec.structs.replace(chat_prompt(chat, [], limits.caps, ChatImages()), messages=messages)]

    details = TokenDetailOptions(num_top=_num_top(response, limits))
    with _renamed_errors(tools):
        parsed = parsed_request_of(
            chat,
            1,
            prompts,
            response.max_output_tokens,
            limits,
            CHAT,
            max_tokens_param="max_output_tokens",
            details=details,
            images=images,
        )
        parsed = with_reply(parsed, limits)
    fields = _fields(response, tools, read.is_stored, sum_of(items) if read.is_stored else 0)
    options = _renamed_grammar(parsed.options, tools)
    return ParsedResponse(
        msgspec.structs.replace(
            parsed,
            options=options,
            dialect=ResponsesDialect(fields),
            prompt_param="input",
            left_out=shown_types(tools.left_out),
        ),
        items,
    )


@contextlib.contextmanager
def _renamed_errors(tools: ChatTools | None = None) -> Iterator[None]:
    """Checks that chats share name a chat's fields."""
    try:
        yield
    except ApiError as error:
        raise renamed(error if tools is None else tools.renamed(error)) from error


def _check(response: ResponsesBody) -> None:
    """Check the fields that only responses have, and refuse those that only chats have."""
    _check_stream(response)
    if response.n not in (None, 1):
        raise unsupported("n", "a response has one choice")
    if response.response_format is not None:
        raise unsupported("response_format", "use text.format")
    if response.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "a response has no place for them")
    for index, name in enumerate(response.include or ()):
        if name not in INCLUDES:
            raise unsupported(f"include[{index}]", f"'{shown(name)}' is not one of {', '.join(INCLUDES)}")
    if (reasoning := response.reasoning) is not None:
        for name in ("summary", "generate_summary"):
            if getattr(reasoning, name) not in (None, "auto"):
                raise unsupported(f"reasoning.{name}", "only auto: the response has the reasoning itself")


def _check_stream(response: ResponsesBody) -> None:
    if response.stream_options is not None:
        if not response.stream:
            raise invalid("stream_options", "'stream_options' is only allowed together with stream = true")
        if response.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")


def _is_stored(response: ResponsesBody, stored: Stored) -> bool:
    """Whether the response is stored. Raises ApiError if it must be and can't."""
    if not stored.is_on:
        if response.background:
            raise unsupported("background", stored.why_off)
        if response.previous_response_id is not None:
            raise unsupported("previous_response_id", stored.why_off)
        return False
    if response.background and response.store is False:
        raise invalid("background", "'background' is not allowed together with store = false", "invalid_value")
    return response.store is not False


def _new_items(
    response: ResponsesBody, limits: RequestLimits, stored: Stored, seed: str, before: StoredSize
) -> tuple[list[SizedItem], int]:
    """The items of the field `input`, and the size of all that the request refers to, after a conversation of the size
    `before`."""
    num_bytes = before.num_bytes
    stored.check_size("previous_response_id", num_bytes)
    match response.input:
        case None:
            raise invalid("input", "'input' is required")
        case str(text):
            found = MessageItem(item_id(MessageItem, f"{seed} 0"), "user", "completed", [InputText(text)])
            return [sized(found)], num_bytes
        case []:
            raise invalid("input", "'input' must not be an empty array", "invalid_value")
        case given:
            check_num_messages(before.num_parts + len(given), limits)
            items: list[SizedItem] = []
            for index, one in enumerate(given):
                if one.type in LEFT_OUT_ITEMS:
                    continue
                if (item_of_body := item_of(index, one, f"{seed} {index}")) is not None:
                    items.append(sized(item_of_body))
                    continue
                param = f"input[{index}].id"
                items.append(referred := stored.item(param, one.id or ""))
                num_bytes += referred.num_bytes
                stored.check_size(param, num_bytes)
            if not items and response.previous_response_id is None:
                message = "'input' must have an item besides calls of tools that only their provider runs"
                raise invalid("input", message, "invalid_value")
            return items, num_bytes


def _chat(response: ResponsesBody, tools: ChatTools) -> ChatBody:
    """The chat that gives the same output."""
    names = (
        *(name for name in GenerationFields.__struct_fields__ if name != "response_format"),
        *TO_CHATS,
        "timeout_s",
    )
    reasoning = response.reasoning
    choice = tools.choice(response.tool_choice)
    return ChatBody(
        **{name: getattr(response, name) for name in dict.fromkeys(names)},
        model=response.model,
        messages=[],
        tools=Raw(tools.json),
        tool_choice=Raw(_encoded(choice)),
        response_format=_response_format(response.text),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        truncate_prompt_tokens=-1 if response.truncation == "auto" else None,
    )


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type not in FORMATS:
        raise invalid("text.format.type", f"'text.format.type' must be one of {', '.join(FORMATS)}", "invalid_value")
    if given.type == "json_schema":
        return ResponseFormat(given.type, JsonSchemaFormat(schema=given.schema))
    return ResponseFormat(given.type, schema=given.schema)


def _renamed_grammar(options: m.GenerationOptions, tools: ChatTools) -> m.GenerationOptions:
    """Name the field of the grammar as in this API: ingest reports it."""
    if options.grammar is None:
        return options
    param = tools.path(options.grammar.param)
    if param.startswith("response_format"):
        param = "text.format.schema" if options.grammar.kind == "closed_schema" else "text.format"
    return msgspec.structs.replace(options, grammar=msgspec.structs.replace(options.grammar, param=param))


def _num_top(response: ResponsesBody, limits: RequestLimits) -> int | None:
    if INCLUDE_LOGPROBS not in (response.include or ()):
        if response.top_logprobs:
            message = f"'top_logprobs' is only allowed together with include: [\"{INCLUDE_LOGPROBS}\"]"
            raise invalid("top_logprobs", message)
        return None
    return check_num_top("top_logprobs", response.top_logprobs or 0, limits.caps)


def _fields(response: ResponsesBody, tools: ChatTools, is_stored: bool, conversation_bytes: int) -> ResponseFields:
    text_format: dict[str, Any] = {"type": "text"}
    if response.text is not None and response.text.format is not None:
        given = response.text.format
        text_format = {"type": given.type}
        if given.type == "json_schema":
            text_format |= {
                "name": given.name or "",
                "description": given.description,
                "schema": given.schema,
                "strict": given.strict,
            }
        elif bytes(given.schema) not in (b"", b"null"):
            text_format["schema"] = given.schema
    verbosity = (None if response.text is None else response.text.verbosity) or "medium"
    reasoning = response.reasoning
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return ResponseFields(
        background=bool(response.background),
        store=is_stored,
        instructions=response.instructions,
        max_output_tokens=response.max_output_tokens,
        metadata=dict(response.metadata or {}),
        parallel_tool_calls=response.parallel_tool_calls is not False,
        previous_response_id=response.previous_response_id,
        prompt_cache_key=response.prompt_cache_key,
        effort=None if reasoning is None else reasoning.effort,
        summary=summary,
        safety_identifier=response.safety_identifier,
        text=_encoded({"format": text_format, "verbosity": verbosity}).decode(),
        tool_choice=_encoded("auto" if response.tool_choice is None else response.tool_choice).decode(),
        tools=tools_json(tools.shown),
        top_logprobs=response.top_logprobs or 0,
        truncation=response.truncation or "disabled",
        user=response.user,
        called=tools.called,
        conversation_bytes=conversation_bytes,
    )


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)
