"""Cases for stored conversations that a small body of /v1/responses continues: its size says nothing of the work.

The part that runs in the gateway's loop must be short however much is stored; the rest runs in a thread.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.http_server.apis.openai import error_json
from pipeline.http_server.bodies.body_reader import BodyReader, Rest
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.stages.gateway.admission.open_bytes import measured
from pipeline.stages.gateway.apis.responses.body import renamed
from pipeline.stages.gateway.apis.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    num_parts,
)
from pipeline.stages.gateway.apis.responses.parsing import StoredSize, finish_response, read_response
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, sized, sum_of
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from tools.scaling_meter.bodies import LIMITS, THREAD_MS
from tools.scaling_meter.case import MAX_BODY, Case

ITEM_BYTES = 128
"""JSON of a small item"""
PART_BYTES = 32
"""JSON of a small part"""
MAX_STORED = 4 * MAX_BODY
"""A conversation grows with each body that continues it."""

CONVERSATIONS: Mapping[str, Callable[[int], list[Item]]] = {
    "messages": lambda n: [_message(i, "user") for i in range(n // ITEM_BYTES)],
    "answers": lambda n: [_message(i, "assistant") for i in range(n // ITEM_BYTES)],
    "parts": lambda n: [MessageItem("msg_0", "user", "completed", [InputText("x")] * (n // PART_BYTES))],
    "long texts": lambda n: [MessageItem("msg_0", "user", "completed", [InputText("x" * (n // 16))] * 16)],
    "calls": lambda n: [
        item
        for i in range(n // (2 * ITEM_BYTES))
        for item in (
            FunctionCallItem(f"fc_{i}", f"c{i}", "f", "{}", "completed"),
            FunctionCallOutputItem(f"fco_{i}", f"c{i}", "a", "completed"),
        )
    ],
    "reasoning": lambda n: [
        ReasoningItem(f"rs_{i}", [], [ReasoningText("a")] * 4, "completed") for i in range(n // (2 * ITEM_BYTES))
    ],
}
"""What is stored, of about n bytes."""
BODIES: Mapping[str, dict[str, Any]] = {
    "continued": {"input": "x", "previous_response_id": "resp_0"},
    "refused": {
        "input": [{"type": "function_call_output", "call_id": "unknown", "output": "a"}],
        "previous_response_id": "resp_0",
    },
    "items named": {"input": [{"type": "item_reference", "id": "msg_0"}] * 100},
}


def cases() -> Iterator[Case]:
    for body, fields in BODIES.items():
        for name, conversation in CONVERSATIONS.items():
            title = f"{body}: {name}"
            yield Case("stored conversation", f"{title}, in the loop", _in_loop(fields, conversation), MAX_STORED)
            make = _in_thread(fields, conversation)
            yield Case("stored conversation", f"{title}, in a thread", make, MAX_STORED, THREAD_MS)


class _Stored:
    """A stored conversation."""

    is_on = True
    why_off = ""

    def __init__(self, items: list[Item]) -> None:
        self._items = [*map(sized, items)]
        self._size = StoredSize(sum_of(self._items), num_parts(items))

    def size(self, response_id: str) -> StoredSize:
        return self._size

    def conversation(self, response_id: str) -> list[SizedItem]:
        return [*self._items]

    def item(self, param: str, item_id: str) -> SizedItem:
        return self._items[0]

    def check_size(self, param: str, num_bytes: int) -> None:
        pass


def _in_loop(
    fields: dict[str, Any], conversation: Callable[[int], list[Item]]
) -> Callable[[int], Callable[[], object]]:
    def make(n: int) -> Callable[[], object]:
        body, parse = _parser(fields, conversation, n)
        reader = BodyReader(MAX_BODY, LIMITS.caps.max_json_depth)
        return lambda: _refused(lambda: reader.parse_now(body, parse))

    return make


def _in_thread(
    fields: dict[str, Any], conversation: Callable[[int], list[Item]]
) -> Callable[[int], Callable[[], object]]:
    def make(n: int) -> Callable[[], object]:
        body, parse = _parser(fields, conversation, n)
        return lambda: _refused(lambda: parse(body).finish())

    return make


def _parser(
    fields: dict[str, Any], conversation: Callable[[int], list[Item]], n: int
) -> tuple[bytes, Callable[[bytes], Rest[ParsedRequest]]]:
    """A small body, and what reads it as the gateway does."""
    stored, limits = _Stored(conversation(n)), LIMITS

    def parse(body: bytes) -> Rest[ParsedRequest]:
        read = read_response(body, limits, stored, "seed")

        def finish() -> ParsedRequest:
            parsed = finish_response(read, limits, stored)
            return measured(parsed.request)

        return Rest(read.num_stored_bytes, finish)

    body = json.dumps({"model": "m"} | fields).encode()
    assert len(body) < LARGE_BYTES
    return body, parse


def _refused(work: Callable[[], object]) -> None:
    try:
        work()
    except ApiError as error:
        assert 400 <= error.status < 500
        error_json(renamed(error))


def _message(i: int, role: str) -> Item:
    part = OutputText("x") if role == "assistant" else InputText("x")
    return MessageItem(f"msg_{i:032x}", role, "completed", [part])
