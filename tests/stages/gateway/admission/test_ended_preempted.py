"""What a request returns that is aborted, or whose deadline passes, while it is preempted."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests.deadlines import Deadlines
from tests.stages.gateway.admission.test_preemption import MAX_BYTES, NUM_TOP, STEP, WHOLE, end, grow, until
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate, events_of
from tests.stages.gateway.peers import RawPeer
from tests.stages.replays import replays_alike

NUM_IDS = STEP
CHARS = 60_000
"""Text of a delta: a request gives way soon."""
DROPPED = "the request timed out after 1000 s, while it waited to generate its output again"


class Dialect(NamedTuple):
    path: str
    body: dict[str, Any]
    ended: Callable[[Any], tuple[object, ...]]
    """Of an aborted reply: its text, its finish reason, its prompt tokens and its output tokens."""
    is_ollama: bool = False


def of_openai(reply: Any) -> tuple[object, ...]:
    (choice,), usage = reply["choices"], reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    text = choice["message"]["content"] if "message" in choice else choice.get("text", "")
    assert not choice.get("token_ids")
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def of_messages(reply: Any) -> tuple[object, ...]:
    usage = reply["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return "".join(one["text"] for one in reply["content"]), reply["stop_reason"], num_prompt, usage["output_tokens"]


def of_responses(reply: Any) -> tuple[object, ...]:
    usage, (item,) = reply["usage"], reply["output"]
    assert (item["status"], reply["error"]) == ("incomplete", None)
    return item["content"][0]["text"], reply["status"], usage["input_tokens"], usage["output_tokens"]


def of_ollama(reply: Any) -> tuple[object, ...]:
    text = reply["message"]["content"] if "message" in reply else reply["response"]
    return text, reply["done_reason"], reply["prompt_eval_count"], reply["eval_count"]


STREAM = WHOLE | {"max_tokens": 4000, "stream": True, "stream_options": {"include_usage": True}}
MOST = {"max_tokens": 400}
SAMPLING = {"sampling_params": MOST}
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", CHAT | MOST, of_openai),
    "completions": Dialect("/v1/completions", COMPLETION | MOST, of_openai),
    "messages": Dialect("/v1/messages", CHAT | MOST, of_messages),
    "responses": Dialect("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 400}, of_responses),
    "ollama chat": Dialect("/api/chat", CHAT | {"stream": False}, of_ollama, True),
    "ollama generate": Dialect("/api/generate", COMPLETION | {"stream": False, "raw": True}, of_ollama, True),
    "token ids": Dialect("/inference/v1/generate", {"token_ids": [1, 2, 3]} | SAMPLING, of_openai),
}
ABORTED = {"/v1/messages": "pause_turn", "/v1/responses": "cancelled"}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, max_open_bytes=MAX_BYTES, request_timeout_s=1000, per_request_metrics=True) as gate:
        yield gate


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the deadline of the newest request pass."""
    newest: list[Callable[[], object]] = []
    add = Deadlines.add

    def noted(self: Deadlines, number: int, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        newest.append(lambda: loop.call_soon_threadsafe(self._expire, number))
        add(self, number, deadline_s)

    monkeypatch.setattr(Deadlines, "add", noted)

    def expire() -> None:
        newest[-1]()

    return expire


@pytest.fixture
def oldest(gate: Gate) -> Iterator[m.Submit]:
    """An older request, which the others give way to. It ends well, and then nothing is kept."""
    response = gate.complete(WHOLE)
    submit = gate.begin()
    grow(gate, submit, 3)
    yield submit
    end(gate, submit)
    assert response.result().status_code == 200
    until(gate, lambda found: found["open_bytes"] == found["open_sequences"] == 0)


def preempt(gate: Gate, victim: m.Submit) -> None:
    """Grow a request until it is preempted."""
    for num in range(60):
        gate.delta(victim, "x" * CHARS, NUM_IDS, num_cached=None if num else 1)
        gate.rig.load()
        if not gate.rig.nothing("schedule", 0.0):
            assert gate.closed() == (victim.request_id, 1)
            return
    raise AssertionError("it was not preempted")


def ask(gate: Gate, path: str, body: Any) -> "Future[Any]":
    return gate.do(gate.client.post, path, json=body, headers={"X-Request-Id": "mine"})


def abort(gate: Gate) -> None:
    reply = gate.client.post("/abort_requests", json={"request_ids": ["mine"]}).json()
    assert reply == {"num_aborted": 1, "num_unknown": 0}


@pytest.mark.usefixtures("oldest")
class TestWhole:
    """The reply is sent at once, so what is dropped is not known to the client."""

    @pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
    def test_an_abort_is_that_of_a_request_without_output(self, gate: Gate, dialect: Dialect) -> None:
        replies = []
        for is_preempted in (True, False):
            response = ask(gate, dialect.path, dialect.body)
            victim = gate.begin()
            if is_preempted:
                preempt(gate, victim)
            abort(gate)
            if not is_preempted:
                gate.delta(victim, num_ids=0, finish=m.Finish.ABORT)
            assert response.result().status_code == 200, response.result().text
            replies.append(dialect.ended(response.result().json()))
        assert replies == [("", ABORTED.get(dialect.path, "abort"), 3, 0)] * 2

    @pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
    @pytest.mark.parametrize("is_back", [False, True], ids=["waits", "was submitted again"])
    def test_a_deadline_is_an_error_that_says_so(
        self, gate: Gate, oldest: m.Submit, expire: Callable[[], None], dialect: Dialect, is_back: bool
    ) -> None:
        response = ask(gate, dialect.path, dialect.body)
        victim = gate.begin()
        preempt(gate, victim)
        if is_back:  # the oldest gives way: it has ended
            end(gate, oldest)
            gate.accept(again := gate.submit())
            assert (again.request_id, again.attempt) == (victim.request_id, 2)
        expire()
        reply = response.result()
        assert reply.status_code == 504
        error = reply.json()["error"]
        assert (error if dialect.is_ollama else error["message"]) == DROPPED
        if is_back:
            gate.finish(again, finish=m.Finish.ABORT)

    def test_a_deadline_before_the_first_token_is_another_error(self, gate: Gate, expire: Callable[[], None]) -> None:
        response = ask(gate, "/v1/completions", COMPLETION)
        victim = gate.begin()
        gate.rig.load()
        expire()
        assert response.result().json()["error"]["message"].endswith("1000 s, before its first token")
        gate.finish(victim, finish=m.Finish.ABORT)

    @pytest.mark.parametrize("how", ["abort", "deadline"])
    def test_its_timings_count_until_its_end(self, gate: Gate, expire: Callable[[], None], how: str) -> None:
        body = COMPLETION | MOST | {"n": 2, "timings": True}
        response = ask(gate, "/v1/completions", body)
        victim = gate.begin()
        begin_s = time.monotonic()
        gate.delta(victim, "all of it", 5, index=1, finish=m.Finish.STOP)
        preempt(gate, victim)
        least_ms = 1000 * (time.monotonic() - begin_s)
        abort(gate) if how == "abort" else expire()
        timings = response.result().json()["timings"]
        aborted = timings["choices"][0]["hops"]
        assert timings["total_ms"] >= least_ms and sum(hop["ms"] for hop in aborted.values()) >= least_ms

    @pytest.mark.parametrize("how", ["abort", "deadline"])
    def test_complete_sequences_are_returned_and_counted(
        self, gate: Gate, expire: Callable[[], None], how: str
    ) -> None:
        response = ask(gate, "/v1/completions", COMPLETION | MOST | {"n": 2})
        victim = gate.begin()
        gate.delta(victim, "all of it", 5, index=1, finish=m.Finish.STOP)
        preempt(gate, victim)
        abort(gate) if how == "abort" else expire()
        reply = response.result().json()
        ends = [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]
        assert ends == [("", "abort"), ("all of it", "stop")] and reply["usage"]["completion_tokens"] == 5


@pytest.mark.usefixtures("oldest")
class TestStreams:
    """The client has the output already: nothing is dropped."""

    @pytest.mark.parametrize("how", ["abort", "deadline"])
    def test_over_http_it_ends_with_what_the_client_has(self, gate: Gate, expire: Callable[[], None], how: str) -> None:
        response = ask(gate, "/v1/completions", STREAM)
        victim = gate.begin()
        preempt_stream(gate, victim)
        abort(gate) if how == "abort" else expire()
        *events, last = events_of(response.result().text)
        choices = [choice for event in events for choice in event["choices"]]
        num_chars = sum(len(choice["text"]) for choice in choices)
        assert num_chars == last["usage"]["completion_tokens"] > 0, "a character has one token here"
        assert choices[-1]["finish_reason"] == "abort"

    @pytest.mark.parametrize("how", ["abort", "deadline"])
    def test_over_zmq_it_ends_with_what_the_client_has(self, gate: Gate, expire: Callable[[], None], how: str) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1, num_credits=1000, max_tokens=4000, logprobs=NUM_TOP)
            victim = gate.begin()
            preempt_stream(gate, victim)
            peer.send(p.Abort(1)) if how == "abort" else expire()
            num_ids, reasons = 0, []
            while not isinstance(message := peer.receive(), p.Finished):
                for output in message.outputs if isinstance(message, p.Delta) else []:
                    num_ids += len(output.token_ids) // 4
                    reasons.append(output.finish_reason)
            assert num_ids == message.num_output_tokens > 0 and reasons[-1] == "abort"

    def test_over_zmq_with_best_of_a_deadline_is_an_error_that_says_so(
        self, gate: Gate, expire: Callable[[], None]
    ) -> None:
        """Nothing is sent before all are complete, as in a whole reply."""
        with RawPeer(gate) as peer:
            peer.generate(1, max_tokens=400, best_of=2)
            preempt(gate, gate.begin())
            expire()
            while not isinstance(message := peer.receive(), p.Failed):
                assert isinstance(message, p.Accepted)
            assert (message.failure.status, message.failure.code) == (504, "timeout")
            assert message.failure.message == DROPPED


def preempt_stream(gate: Gate, victim: m.Submit) -> None:
    """Grow a stream until it is preempted. Schedule keeps most of it."""
    for _ in range(1000):
        grow(gate, victim, 1)
        gate.rig.load()
        if not gate.rig.nothing("schedule", 0.0):
            assert gate.closed() == (victim.request_id, 1)
            return
    raise AssertionError("it was not preempted")


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_its_timings_are_replayed(tmp_path: Path, expire: Callable[[], None], how: str) -> None:
    """When it ended is a reading of the clock."""
    recording = tmp_path / "gateway.rec"
    options: dict[str, Any] = {"max_open_bytes": MAX_BYTES, "request_timeout_s": 1000}
    with Gate(tmp_path, record=recording, **options) as gate:
        kept = gate.complete(WHOLE)
        submit = gate.begin()
        grow(gate, submit, 3)
        response = ask(gate, "/v1/completions", COMPLETION | MOST | {"n": 2, "timings": True})
        victim = gate.begin()
        gate.delta(victim, "all of it", 5, index=1, finish=m.Finish.STOP)
        preempt(gate, victim)
        abort(gate) if how == "abort" else expire()
        assert '"hops"' in response.result().text
        end(gate, submit)
        assert kept.result().status_code == 200
        until(gate, lambda found: found["open_bytes"] == found["open_sequences"] == 0)
    replays_alike("gateway", recording)
