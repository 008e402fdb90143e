"""Streamed background responses: they go on without their client, and are streamed again from any event on."""

import json
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.apis.responses.bodies import PATH, STREAMED, events_of, until_ended
from tests.stages.gateway.gate import END, Gate, read_until
from tests.stages.gateway.peers import until


def open_bytes(gate: Gate) -> int:
    return int(gate.client.get("/load").json()["open_bytes"])


def id_in(begin: bytes) -> str:
    """The response's id, from the beginning of its stream."""
    found: str = json.loads(begin.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    return found


def test_a_background_stream_goes_on_without_its_client(gate: Gate) -> None:
    with gate.raw(STREAMED, PATH) as connection:
        submit = gate.begin()
        gate.delta(submit, "Hel")
        response_id = id_in(read_until(connection, b"output_text.delta"))
    path = f"{PATH}/{response_id}"
    assert gate.client.get(path).json()["status"] == "in_progress"
    follower = gate.do(gate.client.get, f"{path}?stream=true&starting_after=1")
    gate.finish(submit, "lo")
    ended = until_ended(gate, response_id)
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    events = events_of(gate.client.get(f"{path}?stream=true").text)
    assert [event["type"].removeprefix("response.") for event in events[:5]] == [
        "created",
        "queued",
        "in_progress",
        "output_item.added",
        "content_part.added",
    ]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", ended)
    for after, text in ((1, follower.result().text), (4, gate.client.get(f"{path}?stream=true&starting_after=4").text)):
        rest = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
        assert rest == events[after + 1 :]
    assert gate.client.get(f"{path}?stream=true&starting_after={len(events)}").text == ""


def test_the_events_that_a_slow_client_keeps_are_counted_once(tmp_path: Path) -> None:
    """Also when their response is not stored any more: else a client could have the gateway keep any number."""
    body = STREAMED | {"instructions": "a" * 4_000_000, "truncation": "auto"}
    with Gate(tmp_path, send_buffer_bytes=4096) as gate, gate.raw(body, PATH) as connection:
        submit = gate.begin()
        response_id = read_until(connection, b'"object"').partition(b'"id":"')[2].partition(b'"')[0].decode()
        gate.finish(submit, "Hi")
        until_ended(gate, response_id)
        gate.closed()
        path = f"{PATH}/{response_id}"
        assert 4 * 4_000_000 < open_bytes(gate) < 5 * 4_000_000, "four events have the instructions"
        with gate.raw_get(f"{path}?stream=true") as second:
            read_until(second, b"data: {")
            assert gate.client.delete(path).status_code == 200
            assert 4 * 4_000_000 < open_bytes(gate) < 5 * 4_000_000
        connection.close()
        until(lambda: open_bytes(gate) == 0, "it is not read any more")


def test_a_background_stream_that_fails_ends_with_an_error(gate: Gate) -> None:
    future = gate.post(STREAMED, PATH)
    gate.reject(gate.submit(), m.Failure(400, "'messages' is too long", "messages", "context_length_exceeded"))
    events = events_of(future.result().text)
    kinds = ["response.created", "response.queued", "error", "response.failed"]
    assert [event["type"] for event in events] == kinds
    assert events[2]["param"] == "input"
    assert gate.client.get(f"{PATH}/{events[0]['response']['id']}").json() == events[-1]["response"]


def test_a_cancelled_background_stream_ends(gate: Gate) -> None:
    with gate.raw(STREAMED, PATH) as connection:
        submit = gate.begin()
        gate.delta(submit, "Hel")
        response_id = id_in(read_until(connection, b"output_text.delta"))
        future = gate.do(gate.client.post, f"{PATH}/{response_id}/cancel")
        assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
        gate.finish(submit, finish=m.Finish.ABORT)
        assert b'"status":"cancelled"' in read_until(connection, END)
    assert future.result().json()["status"] == "cancelled"


@pytest.mark.parametrize(
    ("query", "param"),
    [("stream=1", "stream"), ("starting_after=1", "starting_after")]
    + [(f"stream=true&starting_after={value}", "starting_after") for value in ("-1", "x", "1" * 10, "")],
)
def test_a_wrong_position_in_a_stream_is_refused(gate: Gate, query: str, param: str) -> None:
    future = gate.post(STREAMED, PATH)
    gate.serve("Hello")
    response_id = events_of(future.result().text)[0]["response"]["id"]
    refused = gate.client.get(f"{PATH}/{response_id}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
