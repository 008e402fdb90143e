"""A replay does not decide by bytes: it repeats what was preempted, resumed, ended and refused, at the same moments."""

from pathlib import Path

from pipeline.replay import format as f
from pipeline.runtime import messages as m
from tests.stages.gateway.admission.test_preemption import MAX_BYTES, WHOLE, end, grow, grow_beyond, load, until
from tests.stages.gateway.gate import COMPLETION, Gate
from tests.stages.gateway.peers import RawPeer
from tests.stages.replays import TEXT_FACTS, entries, order, replay_partial, replays_alike

CONVERSATION = {"model": "tiny", "input": "x" * 30_000}
"""A response whose conversation is kept until it is stored: only the code behind HTTP knows its size."""


def events(recording: Path) -> list[str]:
    return [one.name for one in entries(recording) if isinstance(one, f.ObservedEvent)]


def preempt_and_refuse(gate: Gate) -> None:
    """One of two requests is preempted and resumed, and a third is refused, before its body is read."""
    first = gate.complete(WHOLE)
    oldest = gate.begin()
    second = gate.complete(WHOLE | {"seed": 7})
    victim = gate.begin()
    grow(gate, oldest, 3)
    grow_beyond(gate, victim)
    assert gate.closed() == (victim.request_id, 1)
    used = load(gate)["open_bytes"]
    refused = gate.complete(COMPLETION | {"prompt": "x" * (MAX_BYTES - used)}).result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    end(gate, oldest)
    assert first.result().status_code == 200
    again = gate.submit()
    assert (again.request_id, again.attempt) == (victim.request_id, 2)
    gate.continue_at(again, 0, 0)
    gate.accept(again)
    grow(gate, again, 2, m.Finish.LENGTH)
    assert second.result().json()["choices"][0]["text"] == "t" * 16


def test_what_was_preempted_resumed_and_refused_is_repeated(tmp_path: Path) -> None:
    """The recording has not what the conversation of a response keeps."""
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording, max_open_bytes=MAX_BYTES) as gate:
        stored = gate.post(CONVERSATION, "/v1/responses")
        kept = gate.begin()
        refused = gate.post(CONVERSATION | {"input": "x" * 100_000}, "/v1/responses").result()
        assert refused.status_code == 503 and "gateway.max_open_bytes" in refused.text
        preempt_and_refuse(gate)
        gate.finish(kept, "Hi")
        assert stored.result().status_code == 200
        until(gate, lambda found: found["open_bytes"] == 0)
    found = events(recording)
    assert [found.count(name) for name in ("open", "refused", "preempt", "resume")] == [3, 1, 1, 1]
    comparison = replays_alike("gateway", recording)
    assert set(comparison.sent) == {"ingest.0", "schedule.0", "clients"}
    assert replays_alike("gateway", recording, inline=False) == comparison


def test_a_replay_preempts_nothing_by_itself(tmp_path: Path) -> None:
    """What a client over ZeroMQ has taken is not recorded, so the replay counts more than there was."""
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording, max_open_bytes=MAX_BYTES) as gate:
        first = gate.complete(COMPLETION)
        oldest = gate.begin()
        with RawPeer(gate) as peer:
            peer.generate(1, max_tokens=4000)
            stream = gate.begin()
            for _ in range(40):
                gate.delta(stream, "x" * 8000, 8)
                gate.rig.load()
            assert gate.rig.nothing("schedule", 0.0)
            gate.finish(stream)
            assert gate.closed() == (stream.request_id, 1)
            gate.finish(oldest)
            assert first.result().status_code == 200
            until(gate, lambda found: found["open_sequences"] == 0)
    assert "preempt" not in events(recording)
    replays_alike("gateway", recording)


def test_a_request_that_was_too_large_fails_again(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording, max_open_bytes=MAX_BYTES) as gate:
        failed = gate.complete(COMPLETION | {"max_tokens": 8})
        submit = gate.begin()
        gate.delta(submit, "x" * (MAX_BYTES // 4), 8)
        assert failed.result().status_code == 507
        gate.finish(submit, finish=m.Finish.ABORT)
        until(gate, lambda found: found["open_bytes"] == 0)
    assert events(recording).count("too large") == 1
    replays_alike("gateway", recording)


def test_a_recording_of_a_running_gateway_repeats_the_decisions_too(tmp_path: Path) -> None:
    """Requests from before the recording took the room. What was sent about the others is the same."""
    recording = tmp_path / "late.rec"
    with Gate(tmp_path, max_open_bytes=MAX_BYTES) as gate:
        first = gate.complete(WHOLE)
        early = gate.begin()
        grow(gate, early, 12)
        gate.rig.load()
        gate.rig.send(order(recording, TEXT_FACTS))
        assert gate.rig.receive("supervisor", m.Answer).error == ""
        gate.rig.load()
        gate.rig.load()
        used = load(gate)["open_bytes"]
        refused = gate.complete(COMPLETION | {"prompt": "x" * (MAX_BYTES - used)}).result()
        assert refused.status_code == 503
        second = gate.complete(WHOLE)
        victim = gate.begin()
        grow_beyond(gate, victim)
        assert gate.closed() == (victim.request_id, 1)
        grow(gate, victim, 1)  # was on its way
        end(gate, early)
        assert first.result().status_code == 200
        again = gate.submit()
        gate.continue_at(again, 0, 0)
        grow(gate, again, 2, m.Finish.LENGTH)
        assert second.result().status_code == 200
        until(gate, lambda found: found["open_bytes"] == 0)
    replay_partial("gateway", recording)
    sent = [one for one in entries(recording.with_suffix(".out0")) if isinstance(one, f.Sent)]
    submits = [one.body for one in sent if b"submit" in one.body[:16]]
    assert len(submits) == 2, "the request, and its next attempt"
