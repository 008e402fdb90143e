"""Whatever a client sent, a recording of it is parsed again to the request that was opened."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import RESUMABLE
from pipeline.stages.gateway.apidocs.openapi import example_of
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.fill_in import FAMILIES
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.received import PARSERS, RESPONSES, ZMQ, Received, parse_again
from tests.stages.gateway.apis.poolers import CLASSIFIER
from tests.stages.gateway.gate import CHAT, MODEL, Gate
from tests.stages.gateway.http.test_resumption import points_of, send
from tests.stages.gateway.peers import RawPeer
from tests.stages.replays import replays_alike

Found: TypeAlias = list[tuple[Received, RequestLimits, ParsedRequest]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What was received, the limits then, and the request that was opened."""
    found: Found = []
    newest: list[RequestLimits] = []
    complete, open_ = Received.complete, RequestTable.open

    def note(received: Received, parsed: ParsedRequest, limits: RequestLimits) -> ParsedRequest:
        newest[:] = [msgspec.structs.replace(limits)]
        return complete(received, parsed, limits)

    def keep(table: RequestTable, parsed: ParsedRequest, received: Received | None) -> Request:
        if received is not None:  # else a replay opens it
            found.append((received, newest[0], parsed))
        return open_(table, parsed, received)

    monkeypatch.setattr(Received, "complete", note)
    monkeypatch.setattr(RequestTable, "open", keep)
    return found


def check(one: tuple[Received, RequestLimits, ParsedRequest]) -> None:
    received, limits, request = one
    again = msgspec.json.decode(msgspec.json.encode(received), type=Received)
    assert parse_again(again, limits) == request


def test_each_route_that_opens_a_request_is_known() -> None:
    assert {one.handler for one in ROUTES if one.opens_request} | {ZMQ} == {*PARSERS, RESPONSES}


@pytest.mark.parametrize("handler", [one for one in PARSERS if one != ZMQ])
def test_a_body_is_parsed_again_to_the_same_request(tmp_path: Path, found: Found, handler: str) -> None:
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(FAMILIES[0][:3])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (route,) = (one for one in ROUTES if one.handler == handler)
    with Gate(tmp_path, pooler=CLASSIFIER if handler == "classify" else None) as gate:
        headers = {"X-Request-Id": "mine", RESUMABLE: "1"}
        body = json.dumps(example_of(route, MODEL)).encode()
        reply = gate.do(gate.client.post, route.path, content=body, headers=headers)
        submit = gate.submit()
        gate.reject(submit, m.Failure(400, "enough"))
        assert reply.result().status_code == 400
    (one,) = found
    check(one)
    assert one[2].request_id == "mine"


def respond(gate: Gate, body: dict[str, Any], serve: Callable[[Gate], object]) -> dict[str, Any]:
    reply = gate.post({"model": MODEL} | body, "/v1/responses")
    serve(gate)
    response: dict[str, Any] = reply.result().json()
    assert response["status"] == "completed", response
    return response


def serve_logprobs(gate: Gate) -> None:
    gate.delta(gate.begin(), "Hi", logprobs=[-2.0], pieces=[b"Hi"], finish=m.Finish.STOP)


def test_a_response_that_refers_to_stored_ones_is_recorded_with_them(tmp_path: Path, found: Found) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        first = {"input": "One", "include": ["message.output_text.logprobs"]}
        before = respond(gate, first, serve_logprobs)
        follow_up = {"previous_response_id": before["id"], "input": "Two"}
        named = {
            "input": [{"type": "item_reference", "id": before["output"][0]["id"]}, {"role": "user", "content": "x"}]
        }
        for body in (follow_up, named, follow_up | {"background": True, "stream": True}):
            if body.get("background"):
                reply = gate.post({"model": MODEL} | body, "/v1/responses")
                gate.serve()
                assert "response.completed" in reply.result().text
            else:
                respond(gate, body, Gate.serve)
        gate.rig.until(lambda load: load.num_open_requests == 0)
    assert len(found) == 4
    for one in found:
        check(one)
    assert [len(one[2].prompts[0].messages) for one in found] == [1, 3, 2, 3]  # type: ignore[union-attr]
    replays_alike("gateway", recording)


def test_a_continued_stream_is_recorded_with_its_points(tmp_path: Path, found: Found) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        body = CHAT | {"stream": True}
        reply = send(gate, "/v1/chat/completions", body)
        submit = gate.begin()
        gate.delta(submit, "Hel")
        gate.finish(submit, "lo")
        points = points_of(reply.result().text).splitlines(keepends=True)
        reply = send(gate, "/v1/chat/completions", body, "".join(points[:2]))
        submit = gate.begin()
        gate.delta(submit, "Hel")
        gate.finish(submit, "lo")
        assert reply.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
    for one in found:
        check(one)
    assert [one[2].resumption is not None for one in found] == [False, True]
    replays_alike("gateway", recording)


def test_requests_over_zmq_are_recorded_as_they_came(tmp_path: Path, found: Found) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        with RawPeer(gate) as peer:
            for number, text in enumerate(("small", "large" * 20_000), 1):
                peer.generate(number, text)
                gate.serve()
                while not isinstance(peer.receive(), p.Finished):
                    pass
        gate.rig.until(lambda load: load.num_open_requests == 0)
    assert len(found) == 2
    for one in found:
        check(one)
    replays_alike("gateway", recording)


@pytest.mark.parametrize("now", [{}, {"poet": m.Adapter("poet", "another", "/x")}], ids=["unloaded", "replaced"])
def test_a_request_keeps_the_adapter_that_it_was_parsed_with(
    tmp_path: Path, found: Found, now: dict[str, m.Adapter]
) -> None:
    """A large body waits between parsing and opening, and a recording has the moment of the opening."""
    with Gate(tmp_path) as gate:
        gate.rig.send(m.Adapters([m.Adapter("poet", "first", "/x")]), "supervisor.0")
        gate.rig.until(lambda _: "poet" in gate.client.get("/v1/models").text)
        reply = gate.post(CHAT | {"model": "poet"})
        gate.serve()
        assert reply.result().status_code == 200
    ((received, limits, request),) = found
    assert request.options.adapter_id == "first"
    check((received, msgspec.structs.replace(limits, adapters=now), request))
