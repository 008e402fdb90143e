"""Streams: framing, errors, and isolation of slow clients."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.http import response_writer
from tests.stages.gateway.gate import (
    CHAT,
    COMPLETION,
    END,
    NONE_CACHED,
    Gate,
    ends_with_an_error,
    events_of,
    read_until,
)

STREAM = CHAT | {"stream": True}


class TestStreamedChat:
    def test_a_stream_is_a_role_then_text_and_a_finish_reason_with_the_last(self, gate: Gate) -> None:
        response = gate.post(STREAM)
        submit = gate.submit()
        gate.accept(submit)
        gate.delta(submit, "Hel")
        gate.finish(submit, "lo")
        result = response.result()
        assert result.status_code == 200
        assert result.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = events_of(result.text)
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
        assert events[0]["object"] == "chat.completion.chunk"
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[0] == {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "logprobs": None,
        }
        assert "".join(c["delta"]["content"] for c in choices) == "Hello"
        assert all(c["finish_reason"] is None for c in choices[:-1])
        assert choices[-1] == {
            "index": 0,
            "delta": {"content": choices[-1]["delta"]["content"]},
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
            "token_ids": None,
        }
        assert all("usage" not in event for event in events)
        assert gate.closed() == (submit.request_id, 1)

    def test_a_stream_ends_with_usage_if_requested(self, gate: Gate) -> None:
        response = gate.post(STREAM | {"stream_options": {"include_usage": True}, "n": 2})
        submit = gate.submit()
        gate.accept(submit, num_ids=4)
        gate.finish(submit, "a", 0)
        gate.finish(submit, "b", 1)
        *events, last = events_of(response.result().text)
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, **NONE_CACHED}

    def test_repeated_text_is_sent_once(self, gate: Gate) -> None:
        response = gate.post(STREAM | {"stream_options": {"include_usage": True}})
        submit = gate.submit()
        gate.accept(submit)
        gate.delta(submit, "abc", num_ids=3)
        gate.delta(submit, "bcdef", num_ids=5, back=2)
        gate.delta(submit, "f", num_ids=1, back=1)
        gate.delta(submit, "fg", num_ids=2, back=1, finish=m.Finish.LENGTH)
        *events, usage = events_of(response.result().text)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "abcdefg"
        assert usage["usage"]["completion_tokens"] == 7

    def test_results_of_an_earlier_attempt_are_dropped(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.begin()
        gate.rig.send(m.Deltas([submit.request_id], [0], [0], ["old"], [0], b"", [0], [0], [0], [None]), "detokenize.0")
        gate.rig.send(m.Rejected(submit.request_id, 0, m.Failure(400, "old")), "ingest.0")
        gate.finish(submit, "new")
        assert response.result().json()["choices"][0]["message"]["content"] == "new"

    def test_text_after_a_finish_is_dropped(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"n": 2})
        submit = gate.begin()
        gate.finish(submit, "a", 0)
        gate.delta(submit, "more", index=0)
        gate.finish(submit, "b", 1)
        assert [c["message"]["content"] for c in response.result().json()["choices"]] == ["a", "b"]

    def test_streams_work_over_http_1_0(self, gate: Gate) -> None:
        body = json.dumps(STREAM).encode()
        with socket.create_connection(gate.address, timeout=30) as connection:
            head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            gate.serve("Hello")
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        assert [e["choices"][0]["delta"].get("content") for e in events_of(data.decode().split("\r\n\r\n", 1)[1])] == [
            "",
            "Hello",
        ]


def test_a_streamed_completion_is_text_and_a_finish_reason_with_the_last(gate: Gate) -> None:
    response = gate.complete(COMPLETION | {"stream": True, "prompt": ["a", "b"]})
    first, second = gate.submit(), gate.submit()
    gate.accept(first)
    gate.accept(second)
    gate.finish(second, "y")
    gate.finish(first, "x")
    events = events_of(response.result().text)
    assert {e["object"] for e in events} == {"text_completion"}
    choices = [e["choices"][0] for e in events]
    for index, text in ((0, "x"), (1, "y")):
        mine = [c for c in choices if c["index"] == index]
        assert [(c["text"], c["finish_reason"]) for c in mine] == [(text, "stop")]


class TestStreamErrors:
    def test_an_error_before_the_first_token_has_its_own_status(self, gate: Gate) -> None:
        response = gate.post(STREAM)
        submit = gate.submit()
        gate.accept(submit)
        gate.reject(submit, m.Failure(400, "it can never fit", "max_tokens"), "detokenize.0")
        result = response.result()
        assert (result.status_code, result.json()["error"]["param"]) == (400, "max_tokens")

    def test_a_rejection_before_acceptance_has_its_own_status(self, gate: Gate) -> None:
        response = gate.post(STREAM)
        gate.reject(gate.submit(), m.Failure(503, "no room"))
        result = response.result()
        assert (result.status_code, result.headers["Retry-After"]) == (503, "1")

    def test_an_error_after_the_first_token_is_the_last_event(self, gate: Gate) -> None:
        with gate.raw(STREAM) as connection:
            submit = gate.submit()
            gate.accept(submit)
            gate.delta(submit, "Hel")
            assert read_until(connection, b'"Hel"').startswith(b"HTTP/1.1 200 ")
            gate.delta(submit, "lo", finish=m.Finish.ERROR)
            rest = read_until(connection, END)
        assert rest.index(b'"lo"') < rest.index(b'data: {"error":')
        assert ends_with_an_error(rest, "the server could not finish this request")
        assert gate.closed() == (submit.request_id, 1)

    @pytest.mark.parametrize(
        ("fields", "why", "status", "param"),
        [
            ({"allowed_token_ids": [5]}, m.NOTHING_LEFT, 400, "allowed_token_ids"),
            ({"bad_words": ["x"]}, m.NOTHING_LEFT, 400, "bad_words"),
            ({"bad_words": ["x"]}, "another reason", 500, None),
            ({}, m.NOTHING_LEFT, 400, None),
        ],
    )
    def test_excluding_all_tokens_is_a_client_error(
        self, gate: Gate, fields: dict[str, Any], why: str, status: int, param: str | None
    ) -> None:
        response = gate.post(CHAT | fields)
        gate.delta(gate.begin(), "", 0, finish=m.Finish.ERROR, error=why)
        error = response.result().json()["error"]
        assert (response.result().status_code, error["param"]) == (status, param)
        assert why in error["message"]


def test_headers_wait_for_the_first_token_only_for_a_while(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_writer, "HEADERS_AFTER_S", 0.05)
    with gate.raw(STREAM) as connection:
        submit = gate.submit()
        gate.accept(submit)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        gate.reject(submit, m.Failure(400, "it can never fit"), "detokenize.0")
        rest = read_until(connection, END)
    assert ends_with_an_error(rest, "it can never fit")


@contextmanager
def leaving(gate: Gate, body: Any) -> Iterator[m.Submit]:
    """A client that disconnects at the end of the block."""
    with gate.raw(body):
        submit = gate.submit()
        gate.accept(submit)
        yield submit


class TestDisconnectedClients:
    @pytest.mark.parametrize("body", [CHAT, STREAM, STREAM | {"n": 2}])
    def test_a_disconnected_clients_request_is_aborted_and_closed(self, gate: Gate, body: Any) -> None:
        with leaving(gate, body) as submit:
            gate.delta(submit, "Hel")
        abort = m.Abort(submit.request_id, 1)
        assert gate.rig.receive("ingest", m.Abort) == abort
        assert gate.rig.receive("schedule", m.Abort) == abort
        assert gate.rig.load().num_open_requests == 1
        gate.delta(submit, "lo")
        for index in range(submit.options.n):
            gate.rig.load()
            assert gate.rig.nothing("schedule", 0)
            gate.finish(submit, index=index, finish=m.Finish.ABORT)
        assert gate.closed() == (submit.request_id, 1)
        assert gate.rig.until(lambda load: load.num_open_requests == 0)
        assert gate.rig.nothing("schedule", 0)

    def test_a_disconnect_before_acceptance_is_closed_by_the_rejection(self, gate: Gate) -> None:
        with gate.raw(STREAM):
            submit = gate.submit()
        gate.rig.receive("ingest", m.Abort)
        gate.reject(submit, m.Failure(499, "aborted"))
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_a_disconnect_aborts_all_prompts(self, gate: Gate) -> None:
        with gate.raw(COMPLETION | {"prompt": ["a", "b", "c"]}, "/v1/completions"):
            submits = [gate.begin() for _ in range(3)]
            gate.finish(submits[1])
            assert gate.closed()[0] == submits[1].request_id
        aborted = {gate.rig.receive("schedule", m.Abort).request_id for _ in range(2)}
        assert aborted == {submits[0].request_id, submits[2].request_id}
        for submit in (submits[0], submits[2]):
            gate.finish(submit, finish=m.Finish.ABORT)
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_many_disconnects_leave_no_request_open(self, gate: Gate) -> None:
        connections = [gate.raw(STREAM) for _ in range(40)]
        submits = [gate.submit() for _ in connections]
        for i, submit in enumerate(submits):
            if i % 3:
                gate.accept(submit)
            if i % 3 == 2:
                gate.delta(submit, "x")
        for connection in connections:
            connection.close()
        for _ in submits:
            gate.rig.receive("schedule", m.Abort)
        for submit in submits:
            gate.finish(submit, finish=m.Finish.ABORT)
        gate.rig.until(lambda load: load.num_open_requests == 0)


def test_an_unknown_request_is_aborted_and_forgotten(gate: Gate) -> None:
    unknown = m.Submit(77, 3, 0, 0.0, m.TextPrompt(""), m.GenerationOptions(max_tokens=1))
    gate.delta(unknown, "x")
    for stage in ("ingest", "schedule"):
        assert gate.rig.receive(stage, m.Abort) == m.Abort(77, 3)
    assert gate.rig.receive("schedule", m.Closed) == m.Closed(77, 3)
    gate.finish(unknown)
    assert gate.rig.receive("schedule", m.Closed) == m.Closed(77, 3)
    gate.rig.load()
    assert gate.rig.nothing("schedule", 0)


class TestSlowReader:
    def test_a_slow_reader_delays_no_one_and_gets_everything(self, gate: Gate) -> None:
        with gate.raw(STREAM) as slow:
            submit = gate.submit()
            gate.accept(submit)
            piece, num = "Z" * 200_000, 100  # far more than sockets buffer
            for _ in range(num):
                gate.delta(submit, piece)
            gate.finish(submit)
            for _ in range(3):
                other = gate.post(STREAM)
                gate.serve("quick")
                assert "quick" in other.result().text
            text = read_until(slow, END)
        assert text.count(b"Z") == len(piece) * num
        # Pending deltas were merged.
        assert text.count(b"data: ") < num

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_client_that_reads_nothing_is_disconnected(self, tmp_path: Path, whole: bool) -> None:
        with Gate(tmp_path, slow_client_timeout_s=0.2) as gate, gate.raw(CHAT if whole else STREAM):
            submit = gate.submit()
            gate.accept(submit)
            for _ in range(100):
                gate.delta(submit, "x" * 100_000)
            if whole:
                gate.finish(submit)
            else:
                assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
                gate.finish(submit, finish=m.Finish.ABORT)
            gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_a_client_that_reads_slowly_is_not_disconnected(self, tmp_path: Path) -> None:
        with Gate(tmp_path, slow_client_timeout_s=0.5) as gate, gate.raw(STREAM) as slow:
            submit = gate.submit()
            gate.accept(submit)
            gate.finish(submit, "Z" * 20_000_000)
            num_z, begun = 0, time.monotonic()
            data = b""
            while not data.endswith(END):
                data = slow.recv(1_000_000)
                num_z += data.count(b"Z")
                threading.Event().wait(0.05)
            assert num_z == 20_000_000
            assert time.monotonic() - begun > 1.0, "it took no longer than the timeout, so the test proves nothing"


def test_concurrent_streams_get_their_own_text(gate: Gate) -> None:
    responses = [gate.post(STREAM | {"seed": i}) for i in range(16)]
    submits = [gate.submit() for _ in responses]
    for submit in submits:
        gate.accept(submit)
    for step in range(20):
        for submit in submits:
            gate.delta(submit, f"{submit.options.seed}-{step} ")
    for submit in submits:
        gate.finish(submit)
    for i, response in enumerate(responses):
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events_of(response.result().text))
        assert text == "".join(f"{i}-{step} " for step in range(20))


def test_usage_has_the_cached_tokens(gate: Gate) -> None:
    """The least of each prompt's sequences counts: the others find what that one has computed."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    response = gate.complete(COMPLETION | usage | {"prompt": ["a", "b"], "n": 2})
    for num_cached in ((32, 48), (16, 0)):
        submit = gate.begin()
        for index in range(2):
            gate.delta(submit, "x", index=index, num_cached=num_cached[index])
            gate.finish(submit, index=index)
    usage = events_of(response.result().text)[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
    whole = gate.complete(COMPLETION)
    submit = gate.begin()
    gate.delta(submit, "x", num_cached=2)
    gate.finish(submit)
    assert whole.result().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_usage_has_the_tokens_of_a_prediction(gate: Gate) -> None:
    """The newest counts of each sequence; a request without a prediction has none."""
    prediction = {"prediction": {"type": "content", "content": "a b c"}}
    whole = gate.complete(COMPLETION | prediction | {"n": 2})
    submit = gate.begin()
    assert submit.options.prediction == "a b c"
    gate.delta(submit, "x", drafts=(3, 1))
    gate.delta(submit, "y", drafts=(5, 2))
    gate.finish(submit)
    gate.delta(submit, "z", index=1, drafts=(1, 1))
    gate.finish(submit, index=1)
    details = whole.result().json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}
    plain = gate.complete(COMPLETION)
    gate.serve()
    assert "completion_tokens_details" not in plain.result().json()["usage"]
