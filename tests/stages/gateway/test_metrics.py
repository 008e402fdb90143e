"""The gateway's counters, timings in replies, and GET /metrics."""

import contextlib
import itertools
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.client import protocol as p
from pipeline.metrics import exposition
from pipeline.metrics.request_timings import HOPS, RequestTimings
from pipeline.metrics.stats import GatewayCounts, HistogramCounts, ServerStats, StageCounts
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from tests.rig import PATIENCE_S
from tests.stages.gateway.apis.poolers import give
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of, read_until
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import generate

_nonces = itertools.count(1000)
TIMED = {"timings": True}


def counts_of(gate: Gate) -> GatewayCounts:
    gate.rig.load()  # all earlier messages are handled
    gate.rig.send(m.Count(nonce := next(_nonces)))
    answer = gate.rig.receive("supervisor", m.Answer)
    assert answer.nonce == nonce
    own = msgspec.msgpack.decode(answer.body, type=StageCounts).own
    assert isinstance(own, GatewayCounts)
    return own


def number(histogram: HistogramCounts) -> int:
    return sum(histogram.counts)


def finish_counts(counts: GatewayCounts) -> dict[str, int]:
    return dict(zip(("stop", "length", "abort", "error"), counts.num_finished, strict=True))


def balanced(counts: GatewayCounts, num_running: int = 0) -> bool:
    """Whether each admitted sequence has ended exactly once, except those that are running."""
    return counts.num_opened == sum(counts.num_finished) + counts.num_rejected + num_running


def test_requests_are_counted_by_sequence_with_their_sizes(gate: Gate) -> None:
    replies = [gate.post(CHAT | {"n": 2, "max_tokens": 7}), gate.post(CHAT)]
    submits = [gate.submit(), gate.submit()]
    for submit in submits:
        gate.accept(submit, num_ids=5)
        for index in range(submit.options.n):
            gate.delta(submit, "a", 2, index=index)
        for index in range(submit.options.n):
            gate.delta(submit, "b", 1, index=index, finish=Finish.LENGTH if index else Finish.STOP)
    assert [reply.result().status_code for reply in replies] == [200, 200]
    counts = counts_of(gate)
    assert counts.num_opened == 3
    assert finish_counts(counts) == {"stop": 2, "length": 1, "abort": 0, "error": 0}
    assert balanced(counts)
    assert (number(counts.prompt_tokens), counts.prompt_tokens.total) == (3, 15.0)
    assert (number(counts.output_tokens), counts.output_tokens.total) == (3, 9.0)
    assert number(counts.e2e_s) == number(counts.time_to_first_token_s) == number(counts.time_per_output_token_s) == 3
    assert number(counts.inter_token_s) == 6, "one for each token after a sequence's first"
    assert (number(counts.n), counts.n.total) == (2, 3.0)
    assert (number(counts.max_tokens), counts.max_tokens.total) == (1, 7.0), "only requests with the field count"


def test_the_prompt_of_a_reply_that_overtakes_its_acceptance_is_counted_with_its_length(gate: Gate) -> None:
    """Ingest and detokenize send to the gateway over connections of their own."""
    reply = gate.post(CHAT | {"n": 2})
    submit = gate.submit()
    gate.delta(submit, "a", 2, finish=Finish.STOP)
    assert number(counts_of(gate).prompt_tokens) == 0
    gate.accept(submit, num_ids=5)
    gate.rig.load()
    gate.delta(submit, "a", 2, index=1, finish=Finish.LENGTH)
    assert reply.result().status_code == 200
    counts = counts_of(gate)
    assert (number(counts.prompt_tokens), counts.prompt_tokens.total) == (2, 10.0)
    assert (number(counts.output_tokens), counts.output_tokens.total) == (2, 4.0)
    assert balanced(counts)


def test_ids_received_before_a_resume_are_not_counted_again(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        received = [np.arange(num, dtype="<i4").tobytes() for num in (5, 9)]
        params = {"n": 2, "max_tokens": 20}
        peer.send(generate(1, "Hi", params, 100, received))
        submit = gate.begin()
        for index, num in enumerate((5, 9)):
            gate.continue_at(submit, 3, num, index)
            gate.delta(submit, "a", 1, index=index)
        gate.rig.load()  # both deltas are handled
        time.sleep(0.02)  # the minimum decode time
        gate.delta(submit, "b", 2, index=0, finish=Finish.STOP)
        gate.delta(submit, "", 0, index=1, finish=Finish.STOP)
        while not isinstance(finished := peer.receive(), p.Finished):
            pass
    assert finished.num_output_tokens == 5 + 3 + 9 + 1, "the client gets the total"
    counts = counts_of(gate)
    assert (number(counts.output_tokens), counts.output_tokens.total) == (2, 3.0 + 1.0)
    assert (number(counts.longest_output_tokens), counts.longest_output_tokens.total) == (1, 3.0)
    per_token = counts.time_per_output_token_s
    assert number(per_token) == 1, "a single id has no time between ids"
    assert 0.01 <= per_token.total < counts.e2e_s.total / 2, "of the two ids after the first"
    assert (number(counts.prompt_tokens), counts.prompt_tokens.total) == (2, 6.0)


def test_a_final_delta_without_ids_is_not_a_token(gate: Gate) -> None:
    reply = gate.post(CHAT)
    submit = gate.begin()
    gate.delta(submit, "a", 1)
    gate.delta(submit, "", 0, finish=Finish.STOP)
    reply.result()
    counts = counts_of(gate)
    assert (number(counts.inter_token_s), number(counts.time_to_first_token_s)) == (0, 1)


def test_rejections_are_counted_separately(gate: Gate) -> None:
    reply = gate.post(CHAT | {"n": 3})
    gate.reject(gate.submit(), m.Failure(400, "too long"))
    assert reply.result().status_code == 400
    counts = counts_of(gate)
    assert counts.num_rejected == 3
    assert sum(counts.num_finished) == 0
    assert balanced(counts)


@pytest.mark.parametrize("closing", ["rejected", "abort", "stop"])
def test_a_disconnect_is_counted_as_abort_however_the_request_closes(gate: Gate, closing: str) -> None:
    connection = gate.raw(CHAT | {"stream": True})
    submit = gate.begin()
    gate.delta(submit, "a", 1)
    read_until(connection, b"a")
    connection.close()
    gate.rig.receive("schedule", m.Abort)
    assert balanced(counts_of(gate), num_running=1)
    if closing == "rejected":
        gate.reject(submit, m.Failure(499, "aborted"))
    else:
        gate.finish(submit, finish=Finish.ABORT if closing == "abort" else Finish.STOP)
    gate.closed()
    counts = counts_of(gate)
    assert finish_counts(counts) == {"stop": 0, "length": 0, "abort": 1, "error": 0}
    assert balanced(counts)
    assert counts.num_open == 0
    assert number(counts.e2e_s) == number(counts.output_tokens) == 0


def test_an_internal_error_is_counted_as_error(gate: Gate) -> None:
    reply = gate.post(CHAT)
    gate.finish(gate.begin(), finish=Finish.ERROR)
    assert reply.result().status_code == 500
    assert finish_counts(counts_of(gate))["error"] == 1


def test_overloaded_requests_are_counted(tmp_path: Any) -> None:
    with Gate(tmp_path, max_open_sequences=1) as gate:
        reply = gate.post(CHAT)
        submit = gate.begin()
        assert gate.client.post("/v1/chat/completions", json=CHAT).status_code == 503
        counts = counts_of(gate)
        assert (counts.num_overloaded, counts.num_opened) == (1, 1)
        gate.finish(submit)
        reply.result()


@pytest.mark.parametrize(("limit", "by_size"), [({"max_open_sequences": 2}, 0), ({"max_open_tokens": 500}, 2)])
def test_overloaded_requests_are_counted_by_the_limit_that_they_reach(
    tmp_path: Any, limit: dict[str, Any], by_size: int
) -> None:
    with Gate(tmp_path, **limit) as gate:
        reply = gate.complete(COMPLETION | {"prompt": list(range(450))})
        gate.accept(submit := gate.submit(), 450)
        for _ in range(2):
            refused = gate.client.post("/v1/completions", json=COMPLETION | {"prompt": list(range(60)), "n": 2})
            assert refused.status_code == 503, refused.text
        counts = counts_of(gate)
        assert (counts.num_overloaded, counts.num_overloaded_by_size) == (2, by_size)
        gate.finish(submit)
        reply.result()


# ---------------------------------------------------------------------------------------------------------- timings


def timed(gate: Gate, submit: m.Submit, first: m.FirstTimes, began_s: float, done_s: float, sent_s: float) -> None:
    """Play the stages with given timestamps."""
    ids = np.arange(6, dtype=np.int32).tobytes()
    gate.rig.send(m.Accepted(submit.request_id, submit.attempt, ids, None, None, began_s, done_s), "ingest.0")
    one = np.arange(1, dtype=np.int32).tobytes()
    delta = m.Deltas([submit.request_id], [1], [0], ["x"], [0], one, [0], [1], [0], [None], [first], sent_s - 2, sent_s)
    gate.rig.send(delta, "detokenize.0")
    gate.rig.send(
        m.Deltas([submit.request_id], [1], [0], ["y"], [1], one, [1], [1], [2], [None], [], sent_s - 1, sent_s),
        "detokenize.0",
    )


def test_the_hops_of_a_reply_add_up_to_its_total_time(gate: Gate) -> None:
    reply = gate.complete(COMPLETION | TIMED)
    submit = gate.submit()
    now = time.monotonic()
    timed(gate, submit, m.FirstTimes(0, now + 3, now + 7, now + 12, 4), now + 1, now + 2.5, now + 20)
    body = reply.result().json()
    timings = body["timings"]
    [choice] = timings["choices"]
    assert list(choice["hops"]) == list(HOPS)
    ms = {name: hop["ms"] for name, hop in choice["hops"].items()}
    assert ms["tokenize"] == pytest.approx(1500, abs=0.01)
    assert ms["admit"] == pytest.approx(500, abs=0.01)
    assert ms["queue"] == pytest.approx(4000, abs=0.01)
    assert ms["prefill"] == pytest.approx(5000, abs=0.01)
    assert ms["decode"] == pytest.approx(7000, abs=0.01)
    assert ms["detokenize"] == pytest.approx(1000, abs=0.01)
    assert ms["deliver"] == 0.0, "timestamps in the future never make a hop negative"
    assert sum(ms.values()) == pytest.approx(timings["total_ms"], abs=0.01)
    assert sum(hop["share"] for hop in choice["hops"].values()) == pytest.approx(1, abs=0.001)
    assert (choice["prompt_tokens"], choice["cached_tokens"], choice["output_tokens"]) == (6, 4, 2)
    assert choice["request_id"] == f"{submit.request_id:x}"
    assert 0 < timings["time_to_first_token_ms"] < timings["total_ms"]


def test_a_stream_has_timings_in_its_last_chunk_if_requested(gate: Gate) -> None:
    for timings in (True, False):
        reply = gate.post(CHAT | {"stream": True, "n": 2, "timings": timings})
        gate.serve("Hi")
        events = events_of(reply.result().text)
        with_times = [event for event in events if "timings" in event]
        assert len(with_times) == timings
        if timings:
            assert events[-1]["choices"] == []
            assert [choice["index"] for choice in events[-1]["timings"]["choices"]] == [0, 1]
            assert "usage" not in events[-1]
    reply = gate.post(CHAT | {"stream": True, "timings": True, "stream_options": {"include_usage": True}})
    gate.serve("Hi")
    last = events_of(reply.result().text)[-1]
    assert last["usage"]["completion_tokens"] == 1
    assert last["timings"]["choices"][0]["output_tokens"] == 1


def test_a_reply_has_no_timings_by_default(gate: Gate) -> None:
    reply = gate.post(CHAT)
    gate.serve()
    assert "timings" not in reply.result().json()


def test_timings_must_be_a_boolean(gate: Gate) -> None:
    response = gate.client.post("/v1/chat/completions", json=CHAT | {"timings": "yes"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timings"


def test_timings_number_the_choices_as_the_reply_does(gate: Gate) -> None:
    reply = gate.complete({"model": "tiny", "prompt": ["a", "b"], "n": 2, "timings": True})
    for _ in range(2):
        gate.serve()
    body = reply.result().json()
    assert [c["index"] for c in body["timings"]["choices"]] == [c["index"] for c in body["choices"]] == [0, 1, 2, 3]


def find(gate: Gate, response_id: str) -> RequestTimings | None:
    gate.rig.send(m.FindRequest(next(_nonces), response_id))
    return msgspec.msgpack.decode(gate.rig.receive("supervisor", m.Answer).body, type=RequestTimings | None)


def test_recent_requests_are_found_by_id(gate: Gate) -> None:
    reply = gate.post(CHAT)
    submit = gate.serve()
    response_id = reply.result().json()["id"]
    gate.closed()
    gate.rig.load()
    found = find(gate, response_id)
    assert found is not None
    assert found.sequences[0].request_id == submit.request_id
    assert find(gate, f"{submit.request_id:x}") == found
    assert find(gate, "chatcmpl-0") is None


# ---------------------------------------------------------------------------------------------------------- metrics


def stats(model: str) -> ServerStats:
    return ServerStats("1-ab", 1, "0.1", model, "http://x", "serving", 5.0, 6.0, [], 10, 16, 2048)


def test_metrics_are_the_supervisors_reply(gate: Gate) -> None:
    response = gate.do(gate.client.get, "/metrics")
    question = gate.rig.receive("supervisor", m.AskServerStats)
    gate.rig.send(m.StatsAnswer(question.nonce + 7, stats("stale")))
    gate.rig.send(m.StatsAnswer(question.nonce, stats("one")))
    result = response.result()
    assert result.status_code == 200
    assert result.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(result.text)}
    assert families["vllm:request_success"].samples[0].labels["model_name"] == "one"


def test_requests_during_a_pending_question_get_a_newer_reply(gate: Gate) -> None:
    first = gate.do(gate.client.get, "/metrics")
    question = gate.rig.receive("supervisor", m.AskServerStats)
    others = [gate.do(gate.client.get, "/metrics") for _ in range(5)]
    gate.rig.send(m.StatsAnswer(question.nonce, stats("old")))
    assert '"old"' in first.result().text
    end = time.monotonic() + PATIENCE_S
    num_asked = 0
    while not all(other.done() for other in others) and time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            question = gate.rig.receive("supervisor", m.AskServerStats, timeout_s=0.05)
            gate.rig.send(m.StatsAnswer(question.nonce, stats("new")))
            num_asked += 1
    assert 1 <= num_asked <= 5
    assert all('"new"' in other.result().text for other in others)


def test_the_metrics_that_a_crowd_waits_for_are_written_once(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take milliseconds, and hundreds of clients, who need no key, had them written in one turn of the loop."""
    written = list[str]()
    text_of = exposition.text_of
    monkeypatch.setattr(exposition, "text_of", lambda stats: written.append(stats.model) or text_of(stats))
    asked = [gate.do(gate.client.get, "/metrics") for _ in range(24)]
    end, num_answers = time.monotonic() + PATIENCE_S, 0
    while not all(one.done() for one in asked) and time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            question = gate.rig.receive("supervisor", m.AskServerStats, timeout_s=0.05)
            gate.rig.send(m.StatsAnswer(question.nonce, stats("one")))
            num_answers += 1
    assert all(one.result().status_code == 200 for one in asked) and len(written) == num_answers < len(asked)


def test_metrics_are_503_when_the_supervisor_does_not_reply(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.stages.gateway.admin import stats

    monkeypatch.setattr(stats, "GRACE_S", -1.95)
    with Gate(tmp_path) as gate:
        for _ in range(2):
            response = gate.client.get("/metrics")
            assert response.status_code == 503
            assert "Timed out waiting for the supervisor" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [COMPLETION | {"echo": True, "max_tokens": 0}, None])
def test_requests_without_generation_are_not_counted(gate: Gate, body: Any) -> None:
    reply = gate.complete(body) if body else gate.post({"model": "tiny", "prompt": "Hi"}, "/tokenize")
    gate.begin()
    assert reply.result().status_code == 200
    counts = counts_of(gate)
    assert counts.num_opened == sum(counts.num_finished) == number(counts.n) == 0


def test_the_longest_sequence_of_each_prompt_is_recorded_once(gate: Gate) -> None:
    reply = gate.post(CHAT | {"n": 2})
    submit = gate.begin()
    gate.delta(submit, "aa", 2, finish=Finish.STOP)
    gate.delta(submit, "aaaaa", 5, index=1, finish=Finish.LENGTH)
    reply.result()
    longest = counts_of(gate).longest_output_tokens
    assert (number(longest), longest.total) == (1, 5.0)


def test_a_client_s_maximum_counts_as_what_the_model_can_generate(gate: Gate) -> None:
    """One request must not move the sum of all."""
    reply = gate.post(CHAT | {"max_tokens": 2**31 - 1})
    submit = gate.submit()
    gate.reject(submit, m.Failure(400, "too long"))
    assert reply.result().status_code == 400
    assert counts_of(gate).max_tokens.total == 512


def test_an_embedding_request_counts_once_and_its_inputs_each(gate: Gate) -> None:
    response = gate.post({"input": ["a", "b"]}, "/v1/embeddings")
    for submit in [gate.begin() for _ in range(2)]:
        give(gate, submit, np.ones(8))
    assert response.result().status_code == 200
    assert counts_of(gate).pooled == {"embed": [1, 2, 6]}
