"""/abort_requests, and the names that clients give to their requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.http_server.bodies import abort_body
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin import abort_requests
from tests.stages.gateway.gate import CHAT, COMPLETION, END, MODEL, Gate, events_of, read_until

STREAM = CHAT | {"stream": True}


def abort(gate: Gate, *names: str) -> dict[str, int]:
    result = gate.client.post("/abort_requests", json={"request_ids": names})
    assert result.status_code == 200
    counts: dict[str, int] = result.json()
    return counts


def counts(aborted: int, unknown: int) -> dict[str, int]:
    return {"num_aborted": aborted, "num_unknown": unknown}


def post(gate: Gate, body: Any, name: str, path: str = "/v1/chat/completions") -> Any:
    return gate.do(gate.client.post, path, content=json.dumps(body), headers={"X-Request-Id": name})


def play_abort(gate: Gate, submit: m.Submit, text: str = "") -> None:
    """Play the stages that are to abort a request."""
    for stage in ("ingest", "schedule"):
        assert gate.rig.receive(stage, m.Abort) == m.Abort(submit.request_id, 1)
    for index in range(submit.options.n):
        gate.finish(submit, text, index, m.Finish.ABORT)


class TestAbort:
    def test_an_abort_by_response_id_ends_the_stream_with_a_finish_reason(self, gate: Gate) -> None:
        with gate.raw(STREAM | {"n": 2}) as connection:
            submit = gate.begin()
            gate.delta(submit, "Hel")
            begin = read_until(connection, b'"Hel"')
            name = begin.partition(b'"id":"')[2].partition(b'"')[0].decode()
            assert name.startswith("chatcmpl-")
            assert abort(gate, name) == counts(1, 0)
            play_abort(gate, submit, "lo")
            data = (begin + read_until(connection, END)).partition(b"\r\n\r\n")[2].decode()
        assert data.count('"finish_reason":"abort"') == 2
        assert '"lo"' in data and "error" not in data and "data: [DONE]\n\n" in data
        assert gate.closed() == (submit.request_id, 1)
        gate.rig.until(lambda load: load.num_open_requests == 0)
        assert abort(gate, name) == counts(0, 1)

    @pytest.mark.parametrize("in_header", [True, False])
    def test_an_abort_by_the_clients_name_ends_a_response(self, gate: Gate, in_header: bool) -> None:
        response = post(gate, COMPLETION, "mine", "/v1/completions") if in_header else None
        response = response or gate.complete(COMPLETION | {"request_id": "mine"})
        submit = gate.begin()
        assert abort(gate, "mine") == counts(1, 0)
        play_abort(gate, submit, "some")
        body = response.result().json()
        assert body["id"] == "cmpl-mine"
        assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("some", "abort")]

    def test_an_abort_ends_every_prompt_and_every_request_of_that_name(self, gate: Gate) -> None:
        responses = [post(gate, COMPLETION | {"prompt": ["a", "b"]}, "x", "/v1/completions"), post(gate, CHAT, "x")]
        submits = [gate.begin() for _ in range(3)]
        assert abort(gate, "x", "x", "y") == counts(1, 1)
        for _ in submits:
            gate.rig.receive("schedule", m.Abort)
        for submit in submits:
            gate.finish(submit, finish=m.Finish.ABORT)
        reasons = [c["finish_reason"] for r in responses for c in r.result().json()["choices"]]
        assert reasons == ["abort"] * 3

    @pytest.mark.parametrize("body", [CHAT, STREAM, COMPLETION | {"echo": True}, COMPLETION | {"stream": True}])
    @pytest.mark.parametrize("sender", ["ingest.0", "detokenize.0"])
    def test_an_abort_before_acceptance_is_no_error(self, gate: Gate, body: Any, sender: str) -> None:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        response = post(gate, body, "mine", path)
        submit = gate.submit()
        assert abort(gate, "mine") == counts(1, 0)
        for stage in ("ingest", "schedule"):
            gate.rig.receive(stage, m.Abort)
        gate.reject(submit, m.Failure(499, "the request was aborted", code="aborted"), sender)
        result = response.result()
        assert result.status_code == 200
        last = events_of(result.text)[-1] if body.get("stream") else result.json()
        assert last["choices"][0]["finish_reason"] == "abort"
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_an_aborted_request_that_is_rejected_returns_the_rejection(self, gate: Gate) -> None:
        response = post(gate, CHAT, "mine")
        submit = gate.submit()
        abort(gate, "mine")
        gate.reject(submit, m.Failure(400, "too long", "messages"))
        assert response.result().status_code == 400

    def test_repeated_aborts_are_sent_once(self, gate: Gate) -> None:
        response = post(gate, CHAT, "mine")
        submit = gate.begin()
        assert abort(gate, "mine") == abort(gate, "mine") == counts(1, 0)
        play_abort(gate, submit)
        response.result()
        assert gate.closed()
        gate.rig.load()
        assert gate.rig.nothing("schedule", 0)

    def test_an_aborted_request_is_closed_if_its_client_disconnects(self, gate: Gate) -> None:
        with gate.raw(STREAM | {"request_id": "mine"}):
            submit = gate.begin()
            abort(gate, "mine")
        play_abort(gate, submit)
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_lookups_are_not_found_and_an_empty_list_is_no_error(self, gate: Gate) -> None:
        response = post(gate, {"prompt": "x"}, "mine", "/tokenize")
        submit = gate.submit()
        assert abort(gate, "mine", "tokenize-mine") == counts(0, 2)
        assert abort(gate) == counts(0, 0)
        gate.accept(submit)
        assert response.result().status_code == 200

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "request_ids"),
            ({"request_ids": None}, "request_ids"),
            ({"request_ids": "x"}, "request_ids"),
            ({"request_ids": ["x", 5]}, "request_ids[1]"),
            ({"request_ids": ["x" * 1000]}, "request_ids[0]"),
            ({"request_ids": ["x"] * (abort_body.MAX_IDS + 1)}, "request_ids"),
        ],
    )
    def test_an_error_names_the_invalid_field(self, gate: Gate, body: Any, param: str) -> None:
        result = gate.client.post("/abort_requests", json=body)
        assert (result.status_code, result.json()["error"]["param"]) == (400, param)


class TestSeveralGateways:
    @pytest.fixture
    def gate(self, tmp_path: Path) -> Iterator[Gate]:
        with Gate(tmp_path, siblings=2) as gate:
            yield gate

    def send_abort(self, gate: Gate, *names: str) -> tuple[Any, int]:
        """Abort through this gateway, which forwards it to the others. Returns the future reply and the nonce."""
        answer = gate.do(abort, gate, *names)
        forwarded = [gate.rig.receive(f"gateway.{replica}", m.AbortRequests) for replica in (1, 2)]
        assert forwarded[0] == forwarded[1]
        assert (forwarded[0].gateway, forwarded[0].names) == (0, list(names))
        return answer, forwarded[0].nonce

    def test_all_gateways_are_asked_and_each_name_counts_once(self, gate: Gate) -> None:
        response = post(gate, CHAT, "here")
        submit = gate.begin()
        answer, nonce = self.send_abort(gate, "there", "here", "nowhere", "both")
        gate.rig.send(m.RequestsAborted(2, nonce, [0, 3]), "gateway.2")
        gate.rig.send(m.RequestsAborted(1, nonce, [3]), "gateway.1")
        assert answer.result() == counts(3, 1)
        play_abort(gate, submit)
        assert response.result().json()["choices"][0]["finish_reason"] == "abort"

    def test_a_gateway_aborts_for_another_one_and_reports_what_it_had(self, gate: Gate) -> None:
        response = post(gate, CHAT, "here")
        submit = gate.begin()
        gate.rig.send(m.AbortRequests(2, 77, ["there", "here"]), "gateway.2")
        assert gate.rig.receive("gateway.2", m.RequestsAborted) == m.RequestsAborted(0, 77, [1])
        play_abort(gate, submit)
        assert response.result().json()["choices"][0]["finish_reason"] == "abort"
        assert gate.rig.nothing("gateway.1", 0)

    def test_a_gateway_does_not_wait_for_one_that_hangs(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(abort_requests, "TIMEOUT_S", 0.1)
        answer, nonce = self.send_abort(gate, "a", "b")
        gate.rig.send(m.RequestsAborted(1, nonce, [0]), "gateway.1")
        assert answer.result() == counts(1, 1)
        gate.rig.send(m.RequestsAborted(2, nonce, [1]), "gateway.2")  # too late
        gate.rig.load()


class TestNames:
    @pytest.mark.parametrize("path", ["/version", "/nothing", "/load", "/v1/models", "/v1/models/none"])
    def test_every_response_has_the_request_id_header(self, gate: Gate, path: str) -> None:
        result = gate.client.get(path, headers={"X-Request-Id": "a/b-1"})
        assert result.headers.get_list("X-Request-Id") == ["a/b-1"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_responses_and_errors_have_the_name(self, gate: Gate, stream: bool) -> None:
        response = post(gate, CHAT | {"stream": stream}, "mine")
        gate.serve()
        assert response.result().headers["X-Request-Id"] == "mine"
        assert '"chatcmpl-mine"' in response.result().text
        assert post(gate, CHAT | {"n": 0}, "mine").result().headers["X-Request-Id"] == "mine"

    def test_the_name_is_the_response_id_by_default(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        gate.serve()
        assert response.result().headers["X-Request-Id"] == response.result().json()["id"]

    def test_the_header_overrides_the_body(self, gate: Gate) -> None:
        response = post(gate, CHAT | {"request_id": "body"}, "header")
        gate.serve()
        assert response.result().json()["id"] == "chatcmpl-header"

    @pytest.mark.parametrize("name", ["", "a b", "x" * 257, "tab\there", "ümlaut", "a\r\nSet-Cookie: x"])
    def test_a_name_must_be_valid_in_a_header(self, gate: Gate, name: str) -> None:
        result = gate.client.post("/v1/chat/completions", json=CHAT | {"request_id": name})
        assert (result.status_code, result.json()["error"]["param"]) == (400, "request_id")
        if "\r" not in name:
            request = httpx.Request(
                "POST", f"{gate.url}/v1/chat/completions", headers=[(b"X-Request-Id", name.encode())], json=CHAT
            )
            result = gate.client.send(request)
            assert (result.status_code, result.json()["error"]["param"]) == (400, "X-Request-Id")
            assert "X-Request-Id" not in result.headers

    def test_names_of_finished_requests_are_forgotten(self, gate: Gate) -> None:
        for _ in range(3):
            response = post(gate, CHAT | {"model": MODEL}, "again")
            gate.serve()
            assert response.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
        assert abort(gate, "again", "chatcmpl-again") == counts(0, 2)
