"""Start, drain, death of a stage, and /health."""

import socket
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, END, FACTS, Gate, ends_with_an_error, events_of, read_until

STREAM = CHAT | {"stream": True}
LOAD = m.ScheduleLoad(1, 2, 3, 4, 5, 12, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)


class TestBeforeStart:
    def test_requests_are_refused_with_retry_after(self, tmp_path: Path) -> None:
        with Gate(tmp_path, start=False) as gate:
            for response in (gate.post(CHAT).result(), gate.client.get("/v1/models")):
                assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
                assert response.json()["error"]["code"] == "starting"
            health = gate.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "starting")
            gate.rig.send(m.Start(FACTS))
            gate.rig.load()
            assert gate.client.get("/v1/models").status_code == 200

    def test_the_stage_can_be_stopped(self, tmp_path: Path) -> None:
        with Gate(tmp_path, start=False):
            pass


def answer(gate: Gate, status: str = "ok") -> m.AskHealth:
    question: m.AskHealth = gate.rig.receive("supervisor", m.AskHealth)
    stages = [m.StageHealth("schedule.0", 17, "ready", 0.5)]
    gate.rig.send(m.Health(question.nonce, status, stages, LOAD))
    return question


class TestHealth:
    def test_health_is_the_supervisors_reply(self, gate: Gate) -> None:
        response = gate.do(gate.client.get, "/health")
        answer(gate)
        result = response.result()
        assert result.status_code == 200
        assert result.json() == {
            "status": "ok",
            "reason": None,
            "stages": [{"name": "schedule.0", "pid": 17, "state": "ready", "answer_ms": 0.5}],
            "running": 1,
            "waiting": 2,
            "swapped": 11,
            "kv_blocks": {"free": 3, "cached": 4, "held": 5, "total": 12},
            "swap_blocks": {"free": 12, "total": 13},
            "depth": 19,
            "counters": {
                "prompt_tokens": 6,
                "cached_tokens": 7,
                "output_tokens": 8,
                "preemptions": 9,
                "blocks_swapped_out": 14,
                "blocks_swapped_in": 15,
                "blocks_offloaded": 16,
                "blocks_restored": 17,
                "forks": 18,
                "recomputed_prompt_tokens": 0,
                "steps": 10,
            },
            "open_requests": 0,
            "nan_logits": None,
            "batch_invariant": True,
            "backend": "",
        }

    def test_nan_logits_are_shown_and_leave_the_server_ok(self, gate: Gate) -> None:
        response = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], LOAD, num_nan=3, last_nan_s=1234.5))
        result = response.result()
        assert (result.status_code, result.json()["status"]) == (200, "ok")
        assert result.json()["nan_logits"] == {"sequences": 3, "last": 1234}

    def test_health_is_503_when_a_stage_is_late(self, gate: Gate) -> None:
        response = gate.do(gate.client.get, "/health")
        answer(gate, "late")
        assert (response.result().status_code, response.result().json()["status"]) == (503, "late")

    def test_concurrent_requests_share_one_question(self, gate: Gate) -> None:
        first = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        others = [gate.do(gate.client.get, "/health") for _ in range(4)]
        # A client that disconnects does not cancel the question.
        with socket.create_connection(gate.address, timeout=30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        gate.rig.load()
        gate.rig.send(m.Health(question.nonce, "ok", [], LOAD))
        assert first.result().status_code == 200
        while not all(other.done() for other in others):
            if not gate.rig.nothing("supervisor", 0.05):
                answer(gate)
        assert [other.result().status_code for other in others] == [200] * 4

    def test_health_is_503_when_the_supervisor_does_not_reply(self, gate: Gate) -> None:
        response = gate.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "late")
        # A late reply is not used for the next question.
        late = gate.rig.receive("supervisor", m.AskHealth)
        following = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(late.nonce, "dead", [], None))
        gate.rig.send(m.Health(question.nonce, "ok", [], None))
        assert following.result().json()["status"] == "ok"


class TestDraining:
    def test_an_idle_gateway_is_drained_at_once(self, gate: Gate) -> None:
        gate.rig.send(m.Drain(30.0))
        gate.rig.receive("supervisor", m.Drained)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(gate.address, timeout=30):
            pass

    def test_streams_finish_and_new_requests_are_refused(self, gate: Gate) -> None:
        response = gate.post(STREAM)
        submit = gate.submit()
        gate.accept(submit)
        gate.delta(submit, "Hel")
        gate.rig.send(m.Drain(30.0))
        gate.rig.receive("supervisor", m.WakeRequested)  # if the server sleeps
        gate.rig.load()
        refused = gate.post(CHAT).result()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]["message"]
        health = gate.do(gate.client.get, "/health")
        answer(gate)
        assert (health.result().status_code, health.result().json()["status"]) == (503, "draining")
        assert gate.rig.nothing("supervisor", 0)
        gate.finish(submit, "lo")
        gate.rig.receive("supervisor", m.Drained)
        events = events_of(response.result().text)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"

    def test_at_the_deadline_open_requests_end_with_a_clear_error(self, gate: Gate) -> None:
        with gate.raw(STREAM) as stream:
            submits = [gate.submit()]
            gate.delta(submits[0], "Hel")
            read_until(stream, b'"Hel"')
            others = [gate.post(CHAT), gate.post(STREAM)]
            submits += [gate.submit(), gate.submit()]
            gate.rig.send(m.Drain(0.05))
            aborts = {gate.rig.receive("schedule", m.Abort).request_id for _ in submits}
            assert aborts == {submit.request_id for submit in submits}
            assert ends_with_an_error(read_until(stream, END), "the server is shutting down")
        for result in (other.result() for other in others):
            assert result.status_code == 503
            assert result.json()["error"]["message"] == "the server is shutting down"
        for submit in submits:
            gate.finish(submit, finish=m.Finish.ABORT)
        gate.rig.receive("supervisor", m.Drained)

    def test_a_drain_ends_even_if_a_request_is_never_closed(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        gate.submit()
        gate.rig.send(m.Drain(0.05))
        assert response.result().status_code == 503
        gate.rig.receive("supervisor", m.Drained)

    def test_stop_ends_a_drain(self, tmp_path: Path) -> None:
        with Gate(tmp_path) as gate:
            stream = gate.raw(STREAM)
            submit = gate.submit()
            gate.delta(submit, "Hel")
            read_until(stream, b'"Hel"')
            gate.rig.send(m.Drain(30.0))
        with stream:
            assert b'"code":"shutting_down"' in read_until(stream, END)


class TestDeadStage:
    def test_a_dead_stage_ends_all_requests_with_its_name_and_reason(self, gate: Gate) -> None:
        with gate.raw(STREAM) as stream:
            submit = gate.submit()
            gate.delta(submit, "Hel")
            read_until(stream, b'"Hel"')
            whole = gate.post(CHAT)
            gate.submit()
            gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
            reason = "stage execute.0 died: killed by signal 9"
            assert ends_with_an_error(read_until(stream, END), reason)
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["message"] == reason
        gate.rig.receive("supervisor", m.Drained)
        assert gate.rig.load().num_open_requests == 0

    def test_a_dead_stage_ends_a_drain(self, gate: Gate) -> None:
        with gate.raw(STREAM) as stream, gate.raw(STREAM):  # one client reads, the other does not
            submits = [gate.begin(), gate.begin()]
            gate.delta(submits[0], "Hel")
            read_until(stream, b'"Hel"')
            for _ in range(100):
                gate.delta(submits[1], "x" * 100_000)
            gate.rig.send(m.Drain(PATIENCE_S * 10))
            gate.rig.receive("supervisor", m.WakeRequested)
            gate.rig.load()
            gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
            assert ends_with_an_error(read_until(stream, END), "stage execute.0 died: killed by signal 9")
            gate.rig.receive("supervisor", m.Drained)
            gate.rig.load()
            assert gate.rig.nothing("supervisor", 0)

    def test_a_death_after_a_drain_is_answered_too(self, gate: Gate) -> None:
        gate.rig.send(m.Drain(30.0))
        gate.rig.receive("supervisor", m.Drained)
        gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
        gate.rig.receive("supervisor", m.Drained)

    def test_later_requests_get_the_reason_of_the_death(self, gate: Gate) -> None:
        gate.rig.send(m.StageDied("ingest.0", "exit code 1"))
        gate.rig.receive("supervisor", m.Drained)
        refused = gate.post(CHAT).result()
        assert refused.status_code == 503
        assert "stage ingest.0 died: exit code 1" in refused.json()["error"]["message"]
        health = gate.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["reason"] == "stage ingest.0 died: exit code 1"


def test_a_delta_that_is_missing_fails_its_request_and_no_other(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    response = gate.post(CHAT)
    submit = gate.submit()
    gate.rig.send(m.Deltas([submit.request_id], [1], [0], ["x"], [7], b"", [0], [0], [0], [None]), "detokenize.0")
    result = response.result()
    assert (result.status_code, result.json()["error"]["code"]) == (500, "output_lost")
    assert "a delta is missing" in caplog.text
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
    response = gate.post(CHAT)
    gate.serve()
    assert response.result().status_code == 200
