"""Replies of the Messages API: blocks, stop reasons and usage, complete and streamed, and the order of events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.tools import object_text
from pipeline.stages.gateway.apis.anthropic.types import STOP_REASONS
from tests.stages.gateway.gate import MODEL, Gate, read_until

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOLS: dict[str, Any] = {"tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("find", "now")]}
FIND = '<tool_call>\n{"name": "find", "arguments": {"text": "a"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
USAGE = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        yield gate


def whole(gate: Gate, body: Any, text: str, finish: m.Finish = m.Finish.STOP, stop: str | None = None) -> Any:
    future = gate.post(BODY | body, PATH)
    submit = gate.submit()
    gate.accept(submit, tail="assistant:")
    gate.delta(submit, text, finish=finish, stop_reason=stop)
    response = future.result()
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["X-Request-Id"] == response.json()["id"]
    return response.json()


def events_in(text: str) -> list[Any]:
    """The decoded events of a stream. Each has an `event` line with its type."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(gate: Gate, body: Any, *pieces: str, finish: m.Finish = m.Finish.STOP, stop: str | None = None) -> list[Any]:
    future = gate.post(BODY | body | {"stream": True}, PATH)
    submit = gate.submit()
    gate.accept(submit, tail="assistant:")
    for piece in pieces:
        gate.delta(submit, piece)
    gate.delta(submit, "", num_ids=0, finish=finish, stop_reason=stop)
    response = future.result()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    return events_in(response.text)


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that a client accumulates. Checks the order of the events."""
    first, *events = events
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open, num_pings = False, 0
    arguments: dict[int, str] = {}
    for event in events[:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open = True
            case "ping":
                assert len(message["content"]) == 1
                num_pings += 1
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"], block["type"]:
                    case "text_delta", "text":
                        block["text"] += delta["text"]
                    case "thinking_delta", "thinking":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta", "tool_use":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                    case kinds:
                        raise AssertionError(kinds)
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open and num_pings == min(1, len(message["content"]))
    for index, text in arguments.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            message["content"][index]["input"] = {}
    delta, stop = events[-2:]
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    return message | delta["delta"] | {"usage": delta["usage"]}


# ---------------------------------------------------------------------------------------------------- complete replies


def test_a_complete_reply(gate: Gate) -> None:
    reply = whole(gate, {}, "Hello")
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "Hello"}],
        "model": MODEL,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        (m.Finish.STOP, None, ("end_turn", None)),
        (m.Finish.LENGTH, None, ("max_tokens", None)),
        (m.Finish.STOP, "END", ("stop_sequence", "END")),
        (m.Finish.ABORT, None, ("pause_turn", None)),
    ],
)
def test_stop_reasons(gate: Gate, finish: m.Finish, stop: str | None, expected: Any) -> None:
    assert expected[0] in STOP_REASONS
    reply = whole(gate, {"stop_sequences": ["END"]}, "a", finish, stop)
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected
    reply = joined(stream(gate, {"stop_sequences": ["END"]}, "a", finish=finish, stop=stop))
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "find"}])
def test_a_complete_call_ends_with_tool_use(gate: Gate, choice: Any) -> None:
    reply = whole(gate, TOOLS | {"tool_choice": choice}, FIND)
    (call,) = reply["content"]
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "find", "input": {"text": "a"}}
    assert reply["stop_reason"] == "tool_use"


def test_thinking_text_and_calls_are_blocks(gate: Gate) -> None:
    reply = whole(gate, TOOLS, f"<think>\nHm\n</think>\n\nI look.\n{FIND}\n{NOW}")
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, find, now = reply["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert (text["text"], find["input"], now["input"]) == ("I look.", {"text": "a"}, {})
    assert find["id"] != now["id"]


def test_thinking_is_left_out_on_request(gate: Gate) -> None:
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 9, "display": "omitted"}):
        body, text = {"thinking": thinking}, "<think>\nHm\n</think>\n\nHello"
        assert whole(gate, body, text)["content"] == [{"type": "text", "text": "Hello"}]
        assert joined(stream(gate, body, text))["content"] == [{"type": "text", "text": "Hello"}]


def test_a_number_that_no_float_can_be_is_an_input(gate: Gate) -> None:
    arguments = '{"n": 7e818, "m": [1e400]}'
    text = f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>'
    assert whole(gate, TOOLS, text)["content"][0]["input"] == {"n": float("inf"), "m": [float("inf")]}
    assert object_text(msgspec.Raw(arguments.encode()), "input") == arguments, "in the next turn"


def test_a_call_that_is_cut_off_has_no_input(gate: Gate) -> None:
    text = '<tool_call>\n{"name": "find", "arguments": {"te'
    reply = whole(gate, TOOLS, text, m.Finish.LENGTH)
    assert (reply["stop_reason"], reply["content"][0]["input"]) == ("max_tokens", {})
    events = stream(gate, TOOLS, text, finish=m.Finish.LENGTH)
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"te'


def test_cached_tokens_are_counted_apart(gate: Gate) -> None:
    expected = {"input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 1}
    for is_stream in (False, True):
        future = gate.post(BODY | {"stream": is_stream}, PATH)
        gate.delta(gate.begin(), "a", finish=m.Finish.STOP, num_cached=2)
        response = future.result()
        if not is_stream:
            assert response.json()["usage"] == expected
            continue
        start, *_, delta, _ = events_in(response.text)
        assert start["message"]["usage"] == expected | {"output_tokens": 0}
        assert delta["usage"] == expected


# ------------------------------------------------------------------------------------------------------------- streams


def test_the_order_of_events(gate: Gate) -> None:
    events = stream(gate, TOOLS, "<think>\nHm", "\n</think>\n\n", "Let", " me", FIND)
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        "message_start",
        "start",
        "ping",
        "delta",
        "stop",
        "start",
        *["delta"] * [event.get("index") for event in events if "delta" in event].count(1),
        "stop",
        "start",
        *["delta"] * [event.get("index") for event in events if "delta" in event].count(2),
        "stop",
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    call_id = starts[2].pop("id")
    assert call_id.startswith("toolu_")
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "name": "find", "input": {}},
    ]
    assert joined(events)["stop_reason"] == "tool_use"


TEXTS = [
    "Hello",
    "",
    f"{FIND}\n{NOW}",
    f"a{NOW}b",
    f"<think>\nHm\n</think>\n\nSo{FIND}",
    "<think>\nHm",
    "<tool_call>what?",
    '<tool_call>{"name": "find", "arguments": {"te',
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_adds_up_to_the_complete_reply(gate: Gate, text: str, size: int) -> None:
    complete = whole(gate, TOOLS, text)
    streamed = joined(stream(gate, TOOLS, *(text[at : at + size] for at in range(0, len(text), size))))
    for reply in (complete, streamed):
        del reply["id"], reply["usage"]
        for block in reply["content"]:
            block.pop("id", None)
    assert streamed == complete


def test_text_is_streamed_as_it_arrives(gate: Gate) -> None:
    with gate.raw(BODY | {"stream": True}, PATH) as connection:
        submit = gate.submit()
        gate.accept(submit, tail="")
        gate.delta(submit, "Hel")
        head = read_until(connection, b'"text":"Hel"}}\n\n')
        assert head.index(b"event: message_start") < head.index(b"event: content_block_start") < head.index(b"Hel")
        gate.delta(submit, "lo")
        assert b'{"type":"text_delta","text":"lo"}' in read_until(connection, b"lo")
        gate.finish(submit)
        end = read_until(connection, b"event: message_stop\n")
        assert end.index(b"content_block_stop") < end.index(b"message_delta")


def test_the_first_event_waits_for_the_number_of_prompt_tokens(gate: Gate) -> None:
    """Output may overtake the prompt's ids."""
    future = gate.post(BODY | {"stream": True}, PATH)
    submit = gate.submit()
    gate.delta(submit, "Hi")
    gate.finish(submit)
    gate.accept(submit, num_ids=7, tail="")
    start, *_ = events_in(future.result().text)
    assert start["message"]["usage"]["input_tokens"] == 7


def test_an_error_within_a_stream_is_an_event(gate: Gate) -> None:
    with gate.raw(BODY | {"stream": True}, PATH) as connection:
        submit = gate.submit()
        gate.accept(submit, tail="")
        gate.delta(submit, "Hel")
        read_until(connection, b"Hel")
        gate.delta(submit, "", finish=m.Finish.ERROR, error="out of luck")
        end = read_until(connection, b"\r\n0\r\n\r\n").decode()
    data = end[end.index("event: error\ndata: ") :].split("\n")[1].removeprefix("data: ")
    body = json.loads(data)
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert "out of luck" in body["error"]["message"] and body["request_id"].startswith("msg_")
    assert "message_stop" not in end and "[DONE]" not in end


def test_a_client_that_disconnects_aborts_its_request(gate: Gate) -> None:
    connection = gate.raw(BODY | {"stream": True}, PATH)
    submit = gate.submit()
    gate.accept(submit, tail="")
    gate.delta(submit, "Hel")
    read_until(connection, b"Hel")
    connection.close()
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id


def test_a_request_can_be_aborted_by_its_id(gate: Gate) -> None:
    future = gate.do(gate.client.post, PATH, json=BODY | {"stream": True}, headers={"X-Request-Id": "mine"})
    submit = gate.submit()
    gate.accept(submit, tail="")
    answer = gate.client.post("/abort_requests", json={"request_ids": ["msg_mine"]})
    assert answer.json()["num_aborted"] == 1
    gate.delta(submit, "Hel", finish=m.Finish.ABORT)
    reply = joined(events_in(future.result().text))
    assert (reply["id"], reply["stop_reason"]) == ("msg_mine", "pause_turn")


def test_tokens_are_counted_without_generating(gate: Gate) -> None:
    body = {"model": MODEL, "messages": BODY["messages"], "system": "Be brief."}
    future = gate.post(body, f"{PATH}/count_tokens?beta=true")
    submit = gate.submit()
    assert submit.options.max_tokens == 0
    gate.accept(submit, num_ids=17)
    assert future.result().json() == {"input_tokens": 17}
