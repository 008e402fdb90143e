"""/v1/responses of a gateway, whose stages the test plays: replies, streams, stored and background responses."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway import received
from pipeline.stages.gateway.apis.responses import parsing
from pipeline.stages.gateway.apis.responses.store import ResponseStore
from pipeline.stages.gateway.http import response_writer
from pipeline.text.formats.grammar.lark import AddedToken
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import END, MODEL, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.peers import until
from tests.stages.gateway.replies.choices.scored import token_outputs
from tests.stages.replays import replays_alike

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi"}
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
BACKGROUND = BODY | {"background": True}
STREAMED = BACKGROUND | {"stream": True}


@pytest.fixture
def chat_gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        yield gate


def reply(gate: Gate, body: Any, text: str = "Hello", finish: m.Finish = m.Finish.STOP) -> Any:
    """The response for which the model generates `text`."""
    future = gate.post(body, PATH)
    submit = gate.begin()
    gate.delta(submit, text, num_ids=4, finish=finish, num_cached=2)
    response = future.result()
    assert response.status_code == 200, response.text
    found = response.json()
    Response.model_validate(found, strict=False)
    return found


def events_of(text: str) -> list[Any]:
    """The events of a stream."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.removeprefix("event: ").partition("\ndata: ")
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def until_ended(gate: Gate, response_id: str) -> Any:
    """Poll a background response."""
    found: Any = {}

    def has_ended() -> bool:
        found.update(gate.client.get(f"{PATH}/{response_id}").json())
        return found["status"] not in ("queued", "in_progress")

    until(has_ended, "the background response ends")
    return found


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


# ----------------------------------------------------------------------------------------------------------- stored


def test_a_stored_response_is_returned_listed_continued_and_deleted(chat_gate: Gate) -> None:
    gate = chat_gate
    first = reply(gate, BODY | {"tools": [FIND]}, CALL)
    assert gate.client.get(f"{PATH}/{first['id']}").json() == first
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "here"}
    future = gate.post(BODY | {"previous_response_id": first["id"], "input": [output]}, PATH)
    submit = gate.serve("Done.")
    assert isinstance(submit.prompt, m.ChatPrompt)
    assert [one.role for one in submit.prompt.messages] == ["user", "assistant", "tool"]
    second = future.result().json()
    assert second["previous_response_id"] == first["id"]

    items = f"{PATH}/{second['id']}/input_items"
    page = gate.client.get(items).json()
    assert [item["type"] for item in page["data"]] == ["function_call_output", "function_call", "message"]
    assert (page["first_id"], page["has_more"]) == (page["data"][0]["id"], False)
    ascending = gate.client.get(items, params={"order": "asc", "limit": 2}).json()
    assert ascending["data"] == page["data"][:0:-1] and ascending["has_more"]
    rest = gate.client.get(items, params={"order": "asc", "after": ascending["last_id"]}).json()
    assert rest["data"] == page["data"][:1] and not rest["has_more"]

    future = gate.post(BODY | {"input": [{"type": "item_reference", "id": second["output"][0]["id"]}]}, PATH)
    submit = gate.serve()
    assert isinstance(submit.prompt, m.ChatPrompt) and submit.prompt.messages[0].content == "Done."
    future.result()

    deleted = gate.client.delete(f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        missing = gate.client.request(method, f"{PATH}/{first['id']}{path}")
        error = missing.json()["error"]
        assert (missing.status_code, error["code"]) == (404, "response_not_found")
    gone = gate.post(BODY | {"previous_response_id": first["id"]}, PATH).result()
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")]
)
def test_a_wrong_query_is_refused(gate: Gate, query: str, param: str) -> None:
    found = reply(gate, BODY)
    refused = gate.client.get(f"{PATH}/{found['id']}/input_items?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_small_body_continues_is_read_and_stored_in_a_thread(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The body's size says nothing of the work: the stored conversation's does."""
    threads: dict[str, str] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread().name
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    small = reply(gate, BODY)
    long = [{"role": "user", "content": [{"type": "input_text", "text": "x" * 500}] * 400}]
    large = reply(gate, BODY | {"input": long, "truncation": "auto"})
    watch(parsing, "messages_of")
    watch(parsing, "sum_of")
    watch(received, "measured")
    watch(ResponseStore, "put")

    def names(response: Any) -> set[str]:
        threads.clear()
        body = BODY | {"previous_response_id": response["id"], "truncation": "auto", "stream": stream}
        future = gate.post(body, PATH)
        gate.finish(gate.begin(), "Hello")
        assert future.result().status_code == 200, future.result().text
        assert set(threads) == {"messages_of", "sum_of", "measured", "put"}
        return set(threads.values())

    (loop,) = names(small)
    assert loop not in names(large)


def test_parts_of_a_stored_conversation_count(gate: Gate) -> None:
    parts = [{"type": "input_text", "text": "x"}] * 300
    body = BODY | {"input": [{"role": "user", "content": parts}], "truncation": "auto"}
    first = reply(gate, body)
    refused = gate.post(body | {"previous_response_id": first["id"]}, PATH).result()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "601 messages, tool calls and parts" in refused.json()["error"]["message"]


def test_a_stored_response_is_not_streamed(gate: Gate) -> None:
    found = reply(gate, BODY)
    refused = gate.client.get(f"{PATH}/{found['id']}?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_what_is_large_and_stored_is_encoded_in_a_thread(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up to 30 ms, and a client may ask for it on hundreds of connections."""
    large = reply(gate, BODY | {"input": [{"role": "user", "content": '"' * 100_000}], "instructions": '"' * 100_000})
    small = reply(gate, BODY)
    seen: list[object] = []
    encoded = response_writer.encoded

    async def spied(value: object) -> bytes:
        seen.append(value)
        return await encoded(value)

    monkeypatch.setattr(response_writer, "encoded", spied)
    for found, num in ((small, 0), (large, 2)):
        begin = len(seen)
        assert gate.client.get(f"{PATH}/{found['id']}").json() == found
        items = gate.client.get(f"{PATH}/{found['id']}/input_items").json()
        assert items["data"] and len(seen) == begin + num
    asked = [gate.do(gate.client.get, f"{PATH}/{large['id']}") for _ in range(8)]
    assert all(one.result().json() == large for one in asked) and len(seen) == 2 + 8


def test_without_store_nothing_is_kept(gate: Gate) -> None:
    found = reply(gate, BODY | {"store": False})
    assert not found["store"]
    assert gate.client.get(f"{PATH}/{found['id']}").status_code == 404


def check_is_off(gate: Gate, why: str) -> None:
    found = reply(gate, BODY | {"store": True})
    assert not found["store"]
    refusals: list[tuple[httpx.Response, str]] = [
        (gate.client.get(f"{PATH}/{found['id']}"), "response_id"),
        (gate.client.delete(f"{PATH}/{found['id']}"), "response_id"),
        (gate.client.get(f"{PATH}/{found['id']}/input_items"), "response_id"),
        (gate.post(BACKGROUND, PATH).result(), "background"),
        (gate.post(BODY | {"previous_response_id": found["id"]}, PATH).result(), "previous_response_id"),
        (gate.post(BODY | {"input": [{"id": "msg_1"}]}, PATH).result(), "input[0].id"),
    ]
    for response, param in refusals:
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported")
        assert why in error["message"]


def test_several_gateways_store_nothing_and_say_so(tmp_path: Path) -> None:
    with Gate(tmp_path, replicas=2) as gate:
        check_is_off(gate, "gateway.replicas")


def test_max_stored_responses_bounds_the_store(tmp_path: Path) -> None:
    with Gate(tmp_path, max_stored_responses=1) as gate:
        first, second = reply(gate, BODY), reply(gate, BODY)
        assert gate.client.get(f"{PATH}/{first['id']}").status_code == 404
        assert gate.client.get(f"{PATH}/{second['id']}").status_code == 200


def test_no_response_is_stored_if_the_setting_is_zero(tmp_path: Path) -> None:
    with Gate(tmp_path, max_stored_responses=0) as gate:
        check_is_off(gate, "gateway.max_stored_responses")


def test_max_stored_response_bytes_bounds_the_store(tmp_path: Path) -> None:
    with Gate(tmp_path, max_stored_response_bytes=8192) as gate:
        first = reply(gate, BODY)
        assert gate.client.get(f"{PATH}/{first['id']}").status_code == 200
        second = reply(gate, BODY, "x" * 9000)
        for found in (first, second):
            assert gate.client.get(f"{PATH}/{found['id']}").status_code == 404


def test_clients_find_only_responses_of_their_key(tmp_path: Path) -> None:
    ours, theirs = ({"Authorization": f"Bearer {key}"} for key in (KEY, SECOND))
    with locked(tmp_path) as gate:
        future = gate.do(gate.client.post, PATH, json=BODY, headers=ours)
        gate.serve()
        path = f"{PATH}/{future.result().json()['id']}"
        assert gate.client.get(path, headers=theirs).status_code == 404
        assert gate.client.delete(path, headers=theirs).status_code == 404
        assert gate.client.get(path, headers=ours).status_code == 200


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
