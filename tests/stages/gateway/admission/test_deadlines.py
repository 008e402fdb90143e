"""A request ends at its deadline in every stage, and its output so far is kept."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.errors import RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.http_server import time_left
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.gateway.open_requests import deadlines
from pipeline.stages.gateway.open_requests.deadlines import Deadlines
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, END, Gate, ends_with_an_error, events_of, read_until
from tests.stages.gateway.peers import RawPeer, address_of, all_of, do
from tests.stages.gateway.test_metrics import counts_of
from tests.zmq_requests import generate

SOON = {"timeout_s": 0.15}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TIMED_OUT = "the request timed out after 0.15 s, before its first token"
REFUSED = m.Failure(499, "the request was aborted", code="aborted")


def assert_aborted(gate: Gate, *submits: m.Submit) -> None:
    """Fail unless both stages receive one abort of each request."""
    for stage in ("ingest", "schedule") if submits[0].options.max_tokens != 0 else ("ingest",):
        ids = [gate.rig.receive(stage, m.Abort).request_id for _ in submits]
        assert sorted(ids) == sorted(submit.request_id for submit in submits)


def assert_all_released(gate: Gate) -> None:
    """Fail if a request, credit or token is still held, or if another message is sent."""
    gate.rig.until(lambda load: load.num_open_requests == 0)
    while not gate.rig.nothing("schedule", 0):
        assert isinstance(gate.rig.receive("schedule"), m.Closed)
    assert gate.rig.nothing("ingest", 0)
    load = gate.client.get("/load").json()
    assert (load["server_load"], load["open_sequences"], load["open_tokens"]) == (0, 0, 0)


def error_of(response: Any) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert error["type"] == "server_error"
    return response.status_code, error["code"], error["message"]


class TestWithoutTokens:
    @pytest.mark.parametrize("body", [CHAT, CHAT | STREAM, COMPLETION | {"echo": True}, COMPLETION | {"n": 3}])
    @pytest.mark.parametrize("where", ["ingest", "schedule"])
    def test_a_deadline_without_tokens_is_an_error(self, gate: Gate, body: Any, where: str) -> None:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        response = gate.post(body | SOON, path)
        submit = gate.submit()
        if where == "schedule":
            gate.accept(submit)
        assert_aborted(gate, submit)
        assert error_of(response.result()) == (504, "timeout", TIMED_OUT)
        if where == "ingest":
            gate.reject(submit, REFUSED)
        else:
            for index in range(submit.options.n):
                gate.finish(submit, index=index, finish=Finish.ABORT)
        assert gate.closed() == (submit.request_id, 1), "otherwise schedule keeps a tombstone"
        assert_all_released(gate)

    @pytest.mark.parametrize(
        ("body", "given", "shown"), [({}, "0.15", 0.15), ({"timeout_s": 100}, "0.15", 100), (SOON, "1000", 0.15)]
    )
    def test_an_ingress_says_how_much_of_its_time_is_left(
        self, gate: Gate, body: Any, given: str, shown: float
    ) -> None:
        """It brings the end nearer, and never moves it away."""
        headers = {time_left.HEADER: given}
        response = gate.do(gate.client.post, "/v1/completions", json=COMPLETION | body, headers=headers)
        submit = gate.submit()
        assert_aborted(gate, submit)
        message = TIMED_OUT.replace("0.15", f"{shown:g}")
        assert error_of(response.result()) == (504, "timeout", message)
        gate.reject(submit, REFUSED)
        gate.closed()
        assert_all_released(gate)

    @pytest.mark.parametrize("given", ["", "0", "-1", "1e3", "nan", "1000001", "1_0", "\u0661"])
    def test_a_time_that_is_none_is_refused(self, gate: Gate, given: str) -> None:
        response = gate.client.post(
            "/v1/completions", json=COMPLETION, headers={time_left.HEADER.encode(): given.encode()}
        )
        assert response.status_code == 400 and response.json()["error"]["param"] == time_left.HEADER

    def test_a_deadline_ends_every_prompt_of_a_batch(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | SOON | {"prompt": ["a", "b", "c"], "n": 2})
        submits = [gate.submit() for _ in range(3)]
        gate.accept(submits[0])
        assert_aborted(gate, *submits)
        assert error_of(response.result()) == (504, "timeout", TIMED_OUT)
        for index in range(2):
            gate.finish(submits[0], index=index, finish=Finish.ABORT)
        gate.reject(submits[1], REFUSED)
        gate.reject(submits[2], REFUSED, "detokenize.0")
        assert_all_released(gate)

    def test_in_a_started_stream_the_error_is_an_event(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.stages.gateway.http.response_writer.HEADERS_AFTER_S", 0.01)
        with gate.raw(CHAT | STREAM | SOON) as connection:
            submit = gate.begin()
            read_until(connection, b"text/event-stream")
            assert ends_with_an_error(read_until(connection, END), TIMED_OUT)
        assert_aborted(gate, submit)
        gate.finish(submit, finish=Finish.ABORT)
        assert_all_released(gate)

    def test_an_echoed_prompt_does_not_count_as_output(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.stages.gateway.http.response_writer.HEADERS_AFTER_S", 0.01)
        with gate.raw(COMPLETION | STREAM | SOON | {"echo": True}, "/v1/completions") as connection:
            submit = gate.begin()
            data = read_until(connection, END)
        assert b'"text":"Hi"' in data and ends_with_an_error(data, TIMED_OUT)
        assert_aborted(gate, submit)
        gate.finish(submit, finish=Finish.ABORT)
        assert_all_released(gate)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "x"}),
            ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0}),
        ],
    )
    def test_lookups_have_the_servers_deadline(self, tmp_path: Path, path: str, body: Any) -> None:
        with Gate(tmp_path, request_timeout_s=0.15) as gate:
            response = gate.post(body, path)
            submit = gate.submit()
            assert_aborted(gate, submit)
            assert error_of(response.result()) == (504, "timeout", TIMED_OUT)
            gate.reject(submit, REFUSED)
            assert_all_released(gate)
            assert gate.rig.nothing("schedule", 0)

    def test_results_after_the_deadline_are_dropped(self, gate: Gate) -> None:
        """The acceptance and output that were in flight."""
        response = gate.post(CHAT | SOON)
        submit = gate.submit()
        assert response.result().status_code == 504
        assert_aborted(gate, submit)
        gate.accept(submit)
        gate.delta(submit, "late")
        gate.finish(submit, finish=Finish.ABORT)
        assert_all_released(gate)


class TestWithTokens:
    def test_open_sequences_are_aborted_and_their_output_is_returned(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"timeout_s": 0.3, "n": 3})
        submit = gate.begin()
        gate.finish(submit, "done")
        gate.delta(submit, "so f", 2, index=1)
        assert_aborted(gate, submit)
        assert not response.done(), "its sequences are not closed yet"
        gate.finish(submit, "ar", 1, Finish.ABORT)
        gate.delta(submit, num_ids=0, index=2, finish=Finish.ABORT)
        result = response.result()
        assert result.status_code == 200
        choices = [(one["message"]["content"], one["finish_reason"]) for one in result.json()["choices"]]
        assert choices == [("done", "stop"), ("so far", "abort"), ("", "abort")]
        assert result.json()["usage"]["completion_tokens"] == 4
        assert_all_released(gate)

    def test_a_stream_ends_like_an_aborted_one(self, gate: Gate) -> None:
        response = gate.post(CHAT | STREAM | {"timeout_s": 0.3})
        submit = gate.begin()
        gate.delta(submit, "so f", 2)
        assert_aborted(gate, submit)
        gate.finish(submit, "ar", finish=Finish.ABORT)
        *events, last, usage = events_of(response.result().text)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in [*events, last]) == "so far"
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] == 3
        assert_all_released(gate)

    def test_prompts_of_a_batch_without_tokens_are_aborted_too(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"timeout_s": 0.3, "prompt": ["a", "b", "c"]})
        submits = [gate.submit() for _ in range(3)]
        for submit in submits[:2]:
            gate.accept(submit)
        gate.finish(submits[0], "A")
        assert_aborted(gate, *submits[1:])
        gate.finish(submits[1], finish=Finish.ABORT)
        gate.reject(submits[2], REFUSED)
        result = response.result()
        assert [(one["text"], one["finish_reason"]) for one in result.json()["choices"]] == [
            ("A", "stop"),
            ("", "abort"),
            ("", "abort"),
        ]
        assert_all_released(gate)

    def test_a_request_that_ends_in_time_is_not_affected(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"timeout_s": 0.2})
        gate.serve()
        assert response.result().json()["choices"][0]["finish_reason"] == "stop"
        late = gate.post(CHAT | {"timeout_s": 0.25})  # fires after the first would have
        submit = gate.begin()
        assert late.result().status_code == 504
        assert_aborted(gate, submit)
        gate.finish(submit, finish=Finish.ABORT)
        assert_all_released(gate)

    def test_a_slow_reader_gets_all_output_generated_in_time(self, gate: Gate) -> None:
        with gate.raw(CHAT | STREAM | {"timeout_s": 1.0}) as connection:
            submit = gate.begin()
            for _ in range(40):
                gate.delta(submit, "x" * 100_000)
            gate.finish(submit, "the end")
            gate.closed()
            time.sleep(1.1)  # the deadline passes and must have no effect
            data = read_until(connection, END)
        assert b"the end" in data and b'"finish_reason":"stop"' in data
        assert_all_released(gate)


class TestDeadlineSource:
    def test_the_servers_deadline_is_the_default(self, tmp_path: Path) -> None:
        with Gate(tmp_path, request_timeout_s=0.15) as gate:
            long, short = gate.post(CHAT | {"timeout_s": 100}), gate.post(CHAT)
            submits = [gate.begin(), gate.begin()]
            assert short.result().status_code == 504
            ended = gate.rig.receive("schedule", m.Abort).request_id
            for submit in submits:
                gate.finish(submit, "x", finish=Finish.ABORT if submit.request_id == ended else Finish.STOP)
            assert long.result().json()["choices"][0]["finish_reason"] == "stop"

    def test_there_is_no_deadline_by_default(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.begin()
        assert gate.rig.nothing("schedule", 0.2)
        gate.finish(submit)
        assert response.result().status_code == 200

    def test_the_time_runs_from_the_requests_arrival(self, gate: Gate) -> None:
        """Receiving a slow body counts too."""
        content = json.dumps(CHAT | {"timeout_s": 0.2}).encode()
        with gate.raw({}, "/version") as connection:
            read_until(connection, b"}")
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content[:-1])
            time.sleep(0.3)
            connection.sendall(content[-1:])
            begin_s = time.monotonic()
            assert b" 504 " in read_until(connection, b"}")
            assert time.monotonic() - begin_s < 5
        assert counts_of(gate).num_timed_out == 1
        assert_all_released(gate)
        assert gate.rig.nothing("ingest", 0), "a request that has timed out is not submitted"

    @pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
    def test_the_servers_deadline_applies_to_receiving_the_body(self, tmp_path: Path, path: str) -> None:
        with Gate(tmp_path, request_timeout_s=0.3) as gate, gate.raw({}, "/version") as connection:
            read_until(connection, b"}")
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            begin_s = time.monotonic()
            connection.sendall(head.encode() + b"{")
            answer = read_until(connection, b"}")
            assert b" 504 " in answer and b"timed out after 0.3 s" in answer
            assert time.monotonic() - begin_s < 5
            assert_all_released(gate)
            assert counts_of(gate).num_timed_out == 1


class TestOverZmq:
    async def test_without_tokens_the_request_fails(self, gate: Gate) -> None:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            stream = client.generate("Hi", SamplingParams(n=2), timeout_s=0.15)
            submit = await do(gate.submit)
            with pytest.raises(RequestError) as raised:
                await all_of(stream)
            assert (raised.value.status, raised.value.code, raised.value.message) == (504, "timeout", TIMED_OUT)
            await do(assert_aborted, gate, submit)
            gate.reject(submit, REFUSED)
            await do(assert_all_released, gate)

    async def test_with_tokens_the_request_is_aborted(self, gate: Gate) -> None:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            stream = client.generate("Hi", timeout_s=0.3)
            submit = await do(gate.begin)
            gate.delta(submit, "so f", 2, num_cached=2)
            await do(assert_aborted, gate, submit)
            gate.finish(submit, "ar", finish=Finish.ABORT)
            outputs = await all_of(stream)
            assert "".join(output.text for output in outputs) == "so far"
            assert outputs[-1].finish_reason == "abort"
            assert (stream.num_output_tokens, stream.num_cached_tokens) == (3, 2)
            await do(assert_all_released, gate)

    def test_a_resumed_request_without_new_tokens_fails(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            received = [bytes(4)]
            peer.send(generate(1, "x", timeout_s=0.15, credits=10, received=received))
            submit = gate.begin()
            assert peer.receive(p.Accepted)
            assert peer.receive(p.Failed).failure.code == "timeout"
            assert_aborted(gate, submit)
            gate.finish(submit, finish=Finish.ABORT)
            assert_all_released(gate)

    def test_an_invalid_deadline_is_named(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            for number, timeout_s in enumerate((0.0, -1.0, float("nan"), float("inf"), 2e6)):
                peer.send(generate(number, "x", timeout_s=timeout_s, credits=1))
                failure = peer.receive(p.Failed).failure
                assert (failure.status, failure.param) == (400, "timeout_s")
            assert peer.is_still_served()


class TestDeadlineHeap:
    async def test_each_deadline_expires_once_in_order_unless_removed(self) -> None:
        expired: list[int] = []
        done = asyncio.Event()

        def expire(number: int) -> None:
            expired.append(number)
            if number == 9:
                done.set()

        heap = Deadlines(expire)
        now_s = time.monotonic()
        for number in (9, 3, 7, 5, 1):
            heap.add(number, now_s + number / 100)
        heap.remove(3)
        heap.remove(77)
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        assert expired == [1, 5, 7, 9]
        assert len(heap) == 0 and heap._timer is None

    async def test_a_past_deadline_expires_at_once(self) -> None:
        expired = asyncio.Event()
        heap = Deadlines(lambda _: expired.set())
        heap.add(1, time.monotonic() - 5)
        async with asyncio.timeout(PATIENCE_S):
            await expired.wait()

    async def test_removed_deadlines_take_no_memory(self) -> None:
        heap = Deadlines(lambda _: None)
        far_s = time.monotonic() + 1e6
        heap.add(0, far_s)
        for number in range(1, 10_000):
            heap.add(number, far_s)
            heap.remove(number)
        assert len(heap._heap) <= 2 + deadlines.SLACK
        heap.remove(0)
        assert heap._heap == [] and heap._timer is None
