"""While a stage is late for longer than its timeout, requests that need it get 503 instead of silence."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests import late_stages
from pipeline.stages.gateway.open_requests.late_stages import LateStages
from tests.stages.gateway.gate import CHAT, COMPLETION, END, Gate, ends_with_an_error, read_until

TIMEOUT_S = 30.0
STREAM = CHAT | {"stream": True}


def make_late(gate: Gate, *names: str, for_s: float = TIMEOUT_S + 5) -> None:
    """Tell the gateway which stages are late now, and since when."""
    since_s = time.monotonic() - for_s
    gate.rig.send(m.LateStages(list(names), [since_s] * len(names)))
    gate.rig.load()


def assert_refused(response: Any, stage: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (503, "stage_unresponsive", "server_error")
    assert error["message"].startswith(f"stage {stage} has not answered for 3")
    assert response.headers["Retry-After"] == "5"


def test_new_requests_are_refused_at_once_until_the_stage_is_back(gate: Gate) -> None:
    make_late(gate, "execute.0")
    assert_refused(gate.client.post("/v1/chat/completions", json=CHAT), "execute.0")
    assert_refused(gate.client.post("/v1/completions", json=COMPLETION | {"stream": True}), "execute.0")
    prompt_only = gate.post({"prompt": "Hi"}, "/tokenize")  # needs ingest only
    gate.begin()
    assert prompt_only.result().status_code == 200
    make_late(gate)
    response = gate.post(CHAT)
    gate.serve()
    assert response.result().status_code == 200


def test_a_lookup_is_refused_if_ingest_is_late_and_anthropic_s_errors_have_its_shape(gate: Gate) -> None:
    make_late(gate, "ingest.0")
    assert_refused(gate.client.post("/tokenize", json={"prompt": "Hi"}), "ingest.0")
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    response = gate.client.post("/v1/messages", json=body)
    assert (response.status_code, response.json()["type"]) == (503, "error")


def test_ping_shows_that_requests_are_refused(gate: Gate) -> None:
    make_late(gate, "execute.0")
    for method in ("GET", "POST"):
        assert_refused(gate.client.request(method, "/ping"), "execute.0")
    make_late(gate)
    assert gate.client.get("/ping").status_code == 200


@pytest.mark.parametrize(("timeout_s", "late_s"), [(0.0, 1000.0), (1000.0, 900.0)])
def test_requests_wait_for_a_stage_that_is_late_for_less_than_late_stage_timeout_s(
    tmp_path: Path, timeout_s: float, late_s: float
) -> None:
    with Gate(tmp_path, late_stage_timeout_s=timeout_s) as gate:
        make_late(gate, "execute.0", for_s=late_s)
        response = gate.post(CHAT)
        gate.serve()
        assert response.result().status_code == 200


def test_waiting_requests_fail_when_the_timeout_passes_but_not_those_from_before_or_with_output(tmp_path: Path) -> None:
    with Gate(tmp_path, late_stage_timeout_s=0.5) as gate:
        earlier = gate.post(CHAT)
        first = gate.begin()
        gate.rig.send(m.LateStages(["execute.0"], [time.monotonic()]))
        gate.rig.load()
        begun = gate.raw(STREAM)
        second = gate.begin()
        gate.delta(second, "Hel")
        waiting = gate.post(CHAT)
        third = gate.begin()
        error = waiting.result()
        assert (error.status_code, error.json()["error"]["code"]) == (503, "stage_unresponsive")
        assert gate.rig.receive("schedule", m.Abort).request_id == third.request_id
        gate.finish(third, finish=m.Finish.ABORT)
        make_late(gate)
        gate.finish(second, "lo")
        assert b'"finish_reason":"stop"' in read_until(begun, END)
        begun.close()
        gate.finish(first, "Hello")
        assert earlier.result().status_code == 200


def test_the_timeout_begins_again_after_all_processes_were_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    for module in (late_stages, suspension):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    num_overdue = 0

    def overdue() -> None:
        nonlocal num_overdue
        num_overdue += 1

    async def suspended() -> None:
        late = LateStages(TIMEOUT_S, overdue)
        late.update(m.LateStages(["detokenize.0", "execute.0"], [900.0, 999.0]))
        clock.now_s += 100.0
        with pytest.raises(ApiError, match=r"stage detokenize\.0"):  # was overdue before
            late.check(generates=True)
        late.update(m.LateStages(["execute.0"], [clock.now_s - 1.0]))
        clock.now_s += 100.0
        late._pass()
        late.check(generates=True)
        clock.now_s += TIMEOUT_S - 1.0
        late.check(generates=True)
        assert not num_overdue
        clock.now_s += 1.1
        late._pass()
        assert num_overdue == 1
        with pytest.raises(ApiError, match=r"stage execute\.0"):
            late.check(generates=True)
        late.close()

    asyncio.run(suspended())


def test_a_request_that_came_since_the_silence_began_fails_after_a_suspension_too() -> None:
    """It comes between the stage's last sign of life and its time as the supervisor reports it after a suspension."""

    def request(received_s: float) -> Any:
        return SimpleNamespace(has_begun=False, received_s=received_s, parsed=SimpleNamespace(is_prompt_only=False))

    async def suspended() -> None:
        now_s = time.monotonic()
        late = LateStages(TIMEOUT_S, lambda: None)
        late.update(m.LateStages(["execute.0"], [now_s - TIMEOUT_S - 1.0], [now_s - 1000.0]))
        assert late.error_of(request(now_s - 900.0)) is not None
        assert late.error_of(request(now_s - 1100.0)) is None, "the stage may be busy with it"
        late.update(m.LateStages(["execute.0"], [now_s - 1.0], [now_s - 1000.0]))
        assert late.error_of(request(now_s - 900.0)) is None, "its timeout has not passed"
        late.update(m.LateStages(["execute.0"], [now_s - TIMEOUT_S - 1.0]))
        assert late.error_of(request(now_s - 900.0)) is None
        late.close()

    asyncio.run(suspended())


def test_a_stream_whose_headers_were_sent_ends_with_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stages.gateway.http.response_writer.HEADERS_AFTER_S", 0.05)
    with Gate(tmp_path, late_stage_timeout_s=1.0) as gate:
        gate.rig.send(m.LateStages(["execute.0"], [time.monotonic()]))
        gate.rig.load()
        stream = gate.raw(STREAM)
        submit = gate.begin()
        data = read_until(stream, END)
        assert data.startswith(b"HTTP/1.1 200 OK")
        assert ends_with_an_error(data, "stage execute.0 has not answered for 1 s: try again later")
        gate.finish(submit, finish=m.Finish.ABORT)
        stream.close()
