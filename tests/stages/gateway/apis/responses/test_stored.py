"""Stored responses: returned, listed, continued and deleted, within bounds, and only by their key."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway import received
from pipeline.stages.gateway.apis.responses import parsing
from pipeline.stages.gateway.apis.responses.store import ResponseStore
from pipeline.stages.gateway.http import response_writer
from tests.stages.gateway.apis.responses.bodies import BACKGROUND, BODY, CALL, FIND, PATH, reply
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked


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
    watch(received, "measure")
    watch(ResponseStore, "put")

    def names(response: Any) -> set[str]:
        threads.clear()
        body = BODY | {"previous_response_id": response["id"], "truncation": "auto", "stream": stream}
        future = gate.post(body, PATH)
        gate.finish(gate.begin(), "Hello")
        assert future.result().status_code == 200, future.result().text
        assert set(threads) == {"messages_of", "sum_of", "measure", "put"}
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
