"""GET /pipeline: the counts of the stages, and where each request of the client's scope is."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.metrics import stats as s
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin import handlers, live_state
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.peers import until


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(handlers, "PIPELINE_MAX_AGE_S", -1.0)
    with Gate(tmp_path) as gate:
        yield gate


def stage(name: str, own: s.OwnCounts | None, state: str = "ready") -> s.StageStats:
    counts = s.StageCounts(11, 0, [], own, 3, 2.5, 7, 64, 0) if own is not None else None
    return s.StageStats(name, 7, state, 0, 5.0, 4096, 1.25, 2, counts)


def stats() -> s.ServerStats:
    none = s.NO_VALUES
    gateway = s.GatewayCounts(4, 9, [5, 1, 0, 0], 0, 0, none, none, none, none, none, none, none, none, none)
    schedule = s.ScheduleCounts(3, 2, 50, 6, 8, 64, 100, 60, 700, 1, 30, 1)
    stages = [
        stage("supervisor.0", None),
        stage("gateway.0", gateway),
        stage("ingest.0", s.IngestCounts(1, 1, 5, 0, 100, 0.5)),
        stage("schedule.0", schedule),
        stage("execute.0", s.ExecuteCounts(3, 30, 800, 1.5, 0.5), "late"),
        stage("detokenize.0", s.DetokenizeCounts(3, 0, 700, 0.1)),
        stage("detokenize.1", None, "starting"),
    ]
    return s.ServerStats("1-ab", 1, "0.1", "tiny", "http://x", "serving", 5.0, 6.0, stages, 64, 16, 512)


def pipeline(gate: Gate, key: str | None = None) -> Any:
    """The state, with the counts of `stats`."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = gate.do(gate.client.get, "/pipeline", headers=headers)
    question = gate.rig.receive("supervisor", m.AskServerStats)
    gate.rig.send(m.StatsAnswer(question.nonce, stats()))
    assert response.result().status_code == 200, response.result().text
    return response.result().json()


def requests(gate: Gate, key: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pipeline(gate, key)["requests"]
    return found


def test_the_counts_are_those_of_the_stages(gate: Gate) -> None:
    found = pipeline(gate)
    assert (found["model"], found["state"], found["gateway"], found["requests"]) == ("tiny", "serving", 0, [])
    assert (found["num_running"], found["num_waiting"], found["num_swapped"]) == (3, 2, 1)
    assert found["kv_blocks"] == {"free": 50, "cached": 6, "held": 8, "total": 64}
    assert found["counters"] == {
        "prompt_tokens": 100, "cached_tokens": 60, "output_tokens": 700, "steps": 30, "preemptions": 1, "finished": 6
    }  # fmt: skip
    stages = {one["name"]: one for one in found["stages"]}
    names = ["gateway.0", "ingest.0", "schedule.0", "execute.0", "detokenize.0", "detokenize.1"]
    assert list(stages) == names
    assert [stages[name]["num_active"] for name in names] == [4, 2, 3, 3, 3, 0]
    assert [stages[name]["idle_s"] for name in names] == [None, None, 2.5, 2.5, 2.5, None]
    assert [stages[name]["state"] for name in names[-3:]] == ["late", "ready", "starting"]


def test_a_request_is_seen_in_each_hop_and_after_its_end(gate: Gate) -> None:
    reply = gate.post(CHAT)
    submit = gate.submit()
    (one,) = requests(gate)
    assert (one["id"], one["index"], one["hop"]) == (f"{submit.request_id:x}", 0, "tokenize")
    assert (one["prompt_tokens"], one["output_tokens"], one["hops_ms"]) == (0, 0, {})
    now_s = time.monotonic()
    gate.rig.send(
        m.Accepted(submit.request_id, submit.attempt, b"\0" * 12, began_s=now_s, done_s=now_s + 1), "ingest.0"
    )
    (one,) = requests(gate)
    assert (one["hop"], one["prompt_tokens"]) == ("queue", 3)
    assert list(one["hops_ms"]) == ["gateway", "tokenize"] and one["hops_ms"]["tokenize"] == pytest.approx(1000)
    gate.delta(submit, "Hi", num_cached=2)
    (one,) = requests(gate)
    assert (one["hop"], one["output_tokens"], one["cached_tokens"]) == ("decode", 1, 2)
    assert list(one["hops_ms"]) == ["gateway", "tokenize", "admit", "queue", "prefill"]
    gate.finish(submit, " you")
    assert reply.result().status_code == 200
    gate.closed()
    (one,) = requests(gate)
    assert (one["id"], one["hop"], one["output_tokens"]) == (f"{submit.request_id:x}", None, 2)
    assert list(one["hops_ms"])[-1] == "deliver" and len(one["hops_ms"]) == 8
    assert sum(one["hops_ms"].values()) == pytest.approx(one["total_ms"], abs=0.01)
    assert reply.result().json()["id"] not in str(one), "the id of a response gives access to it"


def test_each_sequence_of_a_request_is_listed(gate: Gate) -> None:
    reply = gate.post(CHAT | {"n": 3})
    submit = gate.begin()
    gate.delta(submit, "a", index=1)
    # Messages of ingest and detokenize may arrive behind the request for the state.
    expected = [(0, "queue"), (1, "decode"), (2, "queue")]
    until(lambda: [(one["index"], one["hop"]) for one in requests(gate)] == expected, "each sequence is where it is")
    for index in range(3):
        gate.finish(submit, "b", index)
    assert reply.result().status_code == 200


def test_the_newest_come_first_and_their_number_is_limited(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "MAX_OPEN", 2)
    monkeypatch.setattr(live_state, "MAX_FINISHED", 1)
    ended = []
    for _ in range(2):
        reply = gate.post(CHAT)
        ended.append(f"{gate.serve().request_id:x}")
        assert reply.result().status_code == 200
        gate.closed()
    replies, submits = [], []
    for _ in range(3):
        replies.append(gate.post(CHAT))
        submits.append(gate.begin())
    expected = [f"{submit.request_id:x}" for submit in (submits[2], submits[1])]
    assert [one["id"] for one in requests(gate)] == [*expected, ended[1]]
    for reply, submit in zip(replies, submits, strict=True):
        gate.finish(submit)
        assert reply.result().status_code == 200


def test_lookups_are_not_listed(gate: Gate) -> None:
    reply = gate.post({"prompt": "Hi"}, "/tokenize")
    submit = gate.submit()
    assert requests(gate) == []
    gate.accept(submit)
    assert reply.result().status_code == 200
    assert requests(gate) == []


def test_a_key_sees_its_own_requests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PIPELINE_MAX_AGE_S", -1.0)
    with locked(tmp_path) as gate:
        open_ones = {}
        for key in (KEY, SECOND):
            headers = {"Authorization": f"Bearer {key}"}
            done = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT, headers=headers)
            ended = gate.serve()
            assert done.result().status_code == 200
            reply = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT, headers=headers)
            open_ones[key] = reply, gate.begin(), ended
        for key, (_, submit, ended) in open_ones.items():
            assert [one["id"] for one in requests(gate, key)] == [f"{submit.request_id:x}", f"{ended.request_id:x}"]
        for reply, submit, _ in open_ones.values():
            gate.finish(submit)
            assert reply.result().status_code == 200


def test_many_pages_share_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PIPELINE_MAX_AGE_S", 60.0)
    with Gate(tmp_path) as gate:
        first = pipeline(gate)
        for _ in range(3):
            assert gate.client.get("/pipeline").json() == first
        with pytest.raises(TimeoutError):
            gate.rig.receive("supervisor", m.AskServerStats, timeout_s=0.05)


def test_it_is_503_if_the_supervisor_does_not_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.stages.gateway.admin import stats

    monkeypatch.setattr(stats, "GRACE_S", -1.95)
    with Gate(tmp_path) as gate:
        response = gate.client.get("/pipeline")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stage_unresponsive")
