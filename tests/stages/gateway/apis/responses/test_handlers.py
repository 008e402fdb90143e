"""/v1/responses of a gateway, whose stages the test plays: replies, streams and background responses."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.text.formats.grammar.lark import AddedToken
from tests.rig import PATIENCE_S
from tests.stages.gateway.apis.responses.bodies import (
    BACKGROUND,
    BODY,
    CALL,
    FIND,
    PATH,
    STREAMED,
    events_of,
    reply,
    until_ended,
)
from tests.stages.gateway.gate import END, MODEL, Gate, read_until
from tests.stages.gateway.peers import until
from tests.stages.gateway.replies.choices.scored import token_outputs
from tests.stages.replays import replays_alike

# ---------------------------------------------------------------------------------------------------------- replies


def test_a_response(gate: Gate) -> None:
    found = reply(gate, BODY | {"metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 9, "user": "u"})
    assert found["id"].startswith("resp_") and found["object"] == "response"
    assert (found["status"], found["error"], found["incomplete_details"]) == ("completed", None, None)
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert found["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    repeated = {"metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 9, "user": "u", "tool_choice": "auto"}
    assert found.items() >= (repeated | {"tools": [], "store": True, "background": False}).items()


def test_the_prompt_is_a_chat(gate: Gate) -> None:
    future = gate.post(BODY | {"instructions": "Be brief."}, PATH)
    submit = gate.serve()
    assert isinstance(submit.prompt, m.ChatPrompt)
    assert [(one.role, one.content) for one in submit.prompt.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert future.result().status_code == 200


def test_a_response_that_reaches_its_limit_is_incomplete(gate: Gate) -> None:
    found = reply(gate, BODY, finish=m.Finish.LENGTH)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"


def test_an_aborted_response_is_cancelled_and_has_its_output(gate: Gate) -> None:
    found = reply(gate, BODY, finish=m.Finish.ABORT)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("cancelled", "Hello")


def test_reasoning_and_calls_are_items(chat_gate: Gate) -> None:
    found = reply(chat_gate, BODY | {"tools": [FIND]}, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    reasoning, message, call = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "find", {"a": 1})
    assert call["call_id"].startswith("call_") and call["id"].startswith("fc_")
    assert found["tools"] == [FIND]


def test_reasoning_tokens_are_counted_to_the_end_mark(tmp_path: Path) -> None:
    mark = AddedToken(2, "</think>")
    tokens = {"added_tokens": [{"id": mark.id, "content": mark.content}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with Gate(tmp_path, chat=ChatSettings(reasoning_parser="qwen3")) as gate:  # ids are 0, 1, 2, 3
        found = reply(gate, BODY, "<think>\nHm.\n</think>\n\nYes.")
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
        assert reply(gate, BODY, "Yes.")["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_logprobs_are_with_the_text(gate: Gate) -> None:
    body = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for is_stream in (False, True):
        future = gate.post(body | {"stream": is_stream}, PATH)
        submit = gate.begin()
        assert submit.options.num_logprobs == 1
        top = [(7, -0.5)]
        gate.delta(submit, "x", token_outputs=token_outputs(-2.0, top=top), pieces=[b"x", b"a"], finish=m.Finish.STOP)
        text = future.result().text
        response = events_of(text)[-1]["response"] if is_stream else json.loads(text)
        (one,) = response["output"][0]["content"][0]["logprobs"]
        assert (one["token"], one["logprob"], one["top_logprobs"][0]["token"]) == ("x", -2.0, "a")


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages", "input"),
        ("prompt", "input"),
        ("max_tokens", "max_output_tokens"),
        ("tools[0].function.parameters", "tools[0].parameters"),
        ("text.format.schema", "text.format.schema"),
        (None, None),
    ],
)
def test_errors_of_later_stages_name_the_field(gate: Gate, param: str | None, expected: str | None) -> None:
    future = gate.post(BODY, PATH)
    gate.reject(gate.submit(), m.Failure(400, f"'{param}' is bad", param, "invalid_grammar"))
    error = future.result().json()["error"]
    assert (error["param"], error["message"]) == (expected, f"'{expected}' is bad")


def test_ids_are_random_and_aborts_accept_the_client_s_id(gate: Gate) -> None:
    future = gate.do(gate.client.post, PATH, json=BODY, headers={"X-Request-Id": "mine"})
    submit = gate.begin()
    assert gate.post({"request_ids": ["mine"]}, "/abort_requests").result().json()["num_aborted"] == 1
    gate.finish(submit, finish=m.Finish.ABORT)
    response = future.result()
    assert response.headers["X-Request-Id"] == "mine"
    assert "mine" not in response.json()["id"]


# ---------------------------------------------------------------------------------------------------------- streams


def test_a_stream_has_openai_s_events_in_their_order(chat_gate: Gate) -> None:
    future = chat_gate.post(BODY | {"stream": True, "tools": [FIND]}, PATH)
    submit = chat_gate.begin()
    for char in f"<think>\nHm.\n</think>\n\nI look.\n{CALL}":
        chat_gate.delta(submit, char)
    chat_gate.finish(submit)
    events = events_of(future.result().text)
    names = [event["type"].removeprefix("response.") for event in events]
    merged = [name for index, name in enumerate(names) if name != names[index - 1]]
    assert merged == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [events[index]["response"]["status"] for index in (0, 1, -1)] == ["in_progress", "in_progress", "completed"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    stored = chat_gate.client.get(f"{PATH}/{events[0]['response']['id']}").json()
    assert stored == events[-1]["response"]


def test_a_stream_that_reaches_its_limit_ends_incomplete(gate: Gate) -> None:
    future = gate.post(BODY | {"stream": True}, PATH)
    gate.finish(gate.begin(), "a", finish=m.Finish.LENGTH)
    last = events_of(future.result().text)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_stream_that_fails_ends_with_an_error_and_the_failed_response(gate: Gate) -> None:
    with gate.raw(BODY | {"stream": True}, PATH) as connection:
        submit = gate.begin()
        gate.delta(submit, "a")
        read_until(connection, b"output_text.delta")
        gate.finish(submit, finish=m.Finish.ERROR)
        end = read_until(connection, END)
        assert b'event: error\ndata: {"type":"error"' in end
    data = end.split(b"event: response.failed\ndata: ")[1].split(b"\n\n")[0]
    response = json.loads(data)["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert gate.client.get(f"{PATH}/{response['id']}").json() == response


def test_an_error_before_the_stream_begins_has_its_status(gate: Gate) -> None:
    future = gate.post(BODY | {"stream": True}, PATH)
    gate.reject(gate.submit(), m.Failure(400, "no", "messages"))
    assert (future.result().status_code, future.result().json()["error"]["param"]) == (400, "input")


def test_a_client_that_leaves_aborts_its_response(gate: Gate) -> None:
    connection = gate.raw(BODY | {"stream": True}, PATH)
    submit = gate.begin()
    gate.delta(submit, "a")
    read_until(connection, b"output_text.delta")
    connection.close()
    assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
    gate.finish(submit, finish=m.Finish.ABORT)


def test_the_official_client_reads_a_stream(gate: Gate) -> None:
    with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def read() -> Any:
            with client.responses.create(model=MODEL, input="Hi", stream=True) as stream:
                return list(stream)

        future = gate.do(read)
        gate.serve("Hello")
        *_, last = future.result()
    assert isinstance(last, ResponseCompletedEvent) and last.response.output_text == "Hello"


def test_the_official_client_accumulates_all_kinds_of_items(chat_gate: Gate) -> None:
    with openai.OpenAI(base_url=f"{chat_gate.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def read() -> Any:
            tools: Any = [FIND]
            with client.responses.stream(model=MODEL, input="Hi", tools=tools) as stream:
                return stream.get_final_response().output

        future = chat_gate.do(read)
        submit = chat_gate.begin()
        for char in f"<think>\nHm.\n</think>\n\nI look.\n{CALL}":
            chat_gate.delta(submit, char)
        chat_gate.finish(submit)
        reasoning, message, call = future.result()
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("find", {"a": 1})


# ------------------------------------------------------------------------------------------------------- background


def test_a_background_response_is_polled(gate: Gate) -> None:
    queued = gate.post(BACKGROUND, PATH).result().json()
    assert (queued["status"], queued["output"], queued["background"]) == ("queued", [], True)
    submit = gate.begin()
    gate.delta(submit, "Hel")
    until(lambda: gate.client.get(f"{PATH}/{queued['id']}").json()["status"] == "in_progress", "it begins")
    unfinished = gate.post(BODY | {"previous_response_id": queued["id"]}, PATH).result().json()["error"]
    assert (unfinished["param"], unfinished["code"]) == ("previous_response_id", "invalid_value")
    gate.finish(submit, "lo")
    found = until_ended(gate, queued["id"])
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    cancelled = gate.client.post(f"{PATH}/{queued['id']}/cancel")
    assert cancelled.json() == found


def test_a_background_response_is_cancelled(gate: Gate) -> None:
    queued = gate.post(BACKGROUND, PATH).result().json()
    submit = gate.begin()
    gate.delta(submit, "Hel")
    future = gate.do(gate.client.post, f"{PATH}/{queued['id']}/cancel")
    assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
    gate.finish(submit, finish=m.Finish.ABORT)
    found = future.result().json()
    assert (found["status"], found["output"][0]["status"]) == ("cancelled", "incomplete")
    assert gate.client.get(f"{PATH}/{queued['id']}").json() == found


def test_only_background_responses_can_be_cancelled(gate: Gate) -> None:
    found = reply(gate, BODY)
    refused = gate.client.post(f"{PATH}/{found['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")


def test_a_background_response_that_fails_says_why(gate: Gate) -> None:
    queued = gate.post(BACKGROUND, PATH).result().json()
    gate.reject(gate.submit(), m.Failure(400, "'messages' is too long", "messages", "context_length_exceeded"))
    found = until_ended(gate, queued["id"])
    assert found["status"] == "failed"
    assert found["error"] == {"code": "context_length_exceeded", "message": "'input' is too long", "param": "input"}


def test_a_deleted_background_response_is_aborted(gate: Gate) -> None:
    queued = gate.post(BACKGROUND, PATH).result().json()
    submit = gate.begin()
    assert gate.client.delete(f"{PATH}/{queued['id']}").status_code == 200
    assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
    gate.finish(submit, finish=m.Finish.ABORT)
    gate.rig.until(lambda load: load.num_open_requests == 0)
    assert gate.client.get(f"{PATH}/{queued['id']}").status_code == 404


def test_a_drain_cancels_background_responses_and_says_so(gate: Gate) -> None:
    other = gate.raw(BODY, PATH)
    open_submit = gate.begin()  # keeps the gateway draining
    queued = gate.post(BACKGROUND, PATH).result().json()
    submit = gate.begin()
    gate.rig.send(m.Drain(PATIENCE_S))
    found = until_ended(gate, queued["id"])
    assert found["status"] == "cancelled"
    assert found["error"]["code"] == "shutting_down"
    assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
    gate.finish(submit, finish=m.Finish.ABORT)
    gate.finish(open_submit, "Hello")
    assert b'"completed"' in read_until(other, b'"total_tokens"')
    gate.rig.receive("supervisor", m.Drained)
    other.close()


def test_responses_are_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    chat = ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")
    with Gate(tmp_path, record=recording, chat=chat) as gate:
        first = reply(gate, BODY | {"tools": [FIND]}, f"<think>\nHm.\n</think>\n\n{CALL}")
        stream = gate.post(BODY | {"stream": True, "previous_response_id": first["id"]}, PATH)
        gate.serve("Hello")
        assert stream.result().status_code == 200
        background = gate.post(STREAMED, PATH)
        gate.serve("Hello")
        assert background.result().status_code == 200
        queued = gate.post(BACKGROUND, PATH).result().json()
        submit = gate.begin()
        future = gate.do(gate.client.post, f"{PATH}/{queued['id']}/cancel")
        gate.rig.receive("ingest", m.Abort)
        gate.finish(submit, "x", finish=m.Finish.ABORT)
        assert future.result().json()["status"] == "cancelled"
        gate.rig.until(lambda load: load.num_open_requests == 0)
    comparison = replays_alike("gateway", recording)
    assert set(comparison.sent) == {"ingest.0", "schedule.0", "clients"}
