"""Bodies of POST /v1/responses, parsed without a gateway, and a store of one conversation."""

import json
from typing import Any

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.fields import ResponseFields
from pipeline.stages.gateway.apis.responses.items import FunctionCallItem, InputText, MessageItem, OutputText, num_parts
from pipeline.stages.gateway.apis.responses.parsing import ParsedResponse, StoredSize, parse_response
from pipeline.stages.gateway.apis.responses.reply import reply_fields_of
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, sized, sum_of
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats

LIMITS = RequestLimits(
    model="tiny",
    max_sequences=64,
    max_prompt_tokens=512,
    formats=ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")),
)
FIND = {"type": "function", "name": "find", "description": "It finds", "parameters": {"type": "object"}}
NOW = {"type": "function", "name": "now"}
WEB = {"type": "web_search", "external_web_access": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
WHY_OFF = "it is off"
THERE = sized(MessageItem("msg_9", "assistant", "completed", [OutputText("There.")]))


class Stored:
    """One stored response of a question and a call."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.why_off = WHY_OFF
        self.checked: list[tuple[str, int]] = []

    def size(self, response_id: str) -> StoredSize:
        items = self.conversation(response_id)
        return StoredSize(sum_of(items), num_parts(one.item for one in items))

    def conversation(self, response_id: str) -> list[SizedItem]:
        if response_id != "resp_1":
            raise invalid("previous_response_id", "not found")
        call = FunctionCallItem("fc_1", "c1", "find", "{}", "completed")
        return [sized(MessageItem("msg_1", "user", "completed", [InputText("Where?")])), sized(call)]

    def item(self, param: str, item_id: str) -> SizedItem:
        if item_id != "msg_9":
            raise invalid(param, "not found")
        return THERE

    def check_size(self, param: str, num_bytes: int) -> None:
        self.checked.append((param, num_bytes))


class LargeConversation:
    """A stored conversation of one message with many parts."""

    is_on = True
    why_off = ""

    def __init__(self, num: int) -> None:
        self.message = sized(MessageItem("msg_1", "user", "completed", [InputText("x")] * num))
        self.num_read = 0

    def size(self, response_id: str) -> StoredSize:
        return StoredSize(self.message.num_bytes, num_parts([self.message.item]))

    def conversation(self, response_id: str) -> list[SizedItem]:
        self.num_read += 1
        return [self.message]

    def item(self, param: str, item_id: str) -> SizedItem:
        return self.message

    def check_size(self, param: str, num_bytes: int) -> None:
        pass


def parsed(*, is_on: bool = True, **fields: Any) -> ParsedResponse:
    body = json.dumps({"model": "tiny", "input": "Hi"} | fields).encode()
    return parse_response(body, LIMITS, Stored(is_on=is_on), "seed")


def request(**fields: Any) -> ParsedRequest:
    return parsed(**fields).request


def reply_fields(**fields: Any) -> ResponseFields:
    return reply_fields_of(request(**fields))


def messages(**fields: Any) -> list[m.ChatMessage]:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt.messages


def prompt(**fields: Any) -> m.ChatPrompt:
    (found,) = request(**fields).prompts
    assert isinstance(found, m.ChatPrompt)
    return found
