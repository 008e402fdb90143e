"""The end of a running chat's reasoning: the request is submitted again, with what its client has."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.replay import format as f
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, END, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.test_scopes import bearer, post
from tests.stages.replays import entries, replays_alike

BUDGET = m.ReasoningBudget(9, [b"<think>"], [b"</think>"], b"\x07\x00\x00\x00", True)
STREAM = CHAT | {"stream": True, "reasoning_control": True, "request_id": "mine"}
PATH = "/v1/chat/completions/control"
SUCCESS = {"success": True}


def control(gate: Gate, name: str, path: str = PATH, **fields: Any) -> Any:
    return gate.client.post(path, json={"action": "reasoning_end", "id": name} | fields)


def begin(gate: Gate, budget: m.ReasoningBudget | None = BUDGET) -> m.Submit:
    """The next request, of which the gateway has heard that schedule has it."""
    submit = gate.submit()
    gate.accept(submit, budget=budget)
    gate.delta(submit, "", 0)
    gate.rig.load()
    return submit


def ended(gate: Gate, submit: m.Submit) -> m.Submit:
    """The request as it is submitted again; schedule is to forget the attempt before."""
    gone = gate.rig.receive("schedule")
    assert isinstance(gone, m.Closed | m.Abort) and (gone.request_id, gone.attempt) == (submit.request_id, 1)
    again = gate.submit()
    assert (again.request_id, again.attempt) == (submit.request_id, submit.attempt + 1)
    assert again.options.reasoning_budget == msgspec.structs.replace(BUDGET, ends_now=True)
    return again


@pytest.mark.parametrize("in_path", [True, False])
def test_a_stream_goes_on_with_the_end_of_its_reasoning(gate: Gate, in_path: bool) -> None:
    with gate.raw(STREAM) as connection:
        submit = begin(gate)
        gate.delta(submit, "Hm, ", 2)
        read_until(connection, b'"Hm, "')
        if in_path:
            found = gate.client.post("/v1/chat/completions/chatcmpl-mine/control", json={"action": "reasoning_end"})
        else:
            found = control(gate, "mine")
        assert (found.status_code, found.json()) == (200, SUCCESS)
        again = ended(gate, submit)
        assert again.outputs == [np.arange(2, dtype=np.int32).tobytes()]
        assert control(gate, "mine").json() == SUCCESS  # nothing changes: the next message is the delta's
        gate.accept(again)
        gate.finish(again, "well.")
        data = read_until(connection, END)
    assert b'"well."' in data and b"error" not in data
    gate.rig.until(lambda load: load.num_open_requests == 0)
    assert not control(gate, "mine").json()["success"]


def test_a_request_that_is_still_read_has_no_reasoning(gate: Gate) -> None:
    stream = gate.post(STREAM)
    submit = gate.submit()
    assert control(gate, "mine").json() == SUCCESS
    assert gate.rig.receive("ingest", m.Abort) == m.Abort(submit.request_id, 1)
    again = gate.submit()
    assert again.attempt == 2 and again.options.thinking_token_budget == 0
    assert again.prompt == submit.prompt and again.prompt_options == submit.prompt_options
    gate.accept(submit)  # it crossed the abort
    gate.accept(again, budget=BUDGET)
    gate.finish(again, "well.")
    assert '"well."' in stream.result().text


def test_a_death_of_schedule_does_not_open_it_again(gate: Gate) -> None:
    stream = gate.post(STREAM)
    submit = begin(gate)
    assert control(gate, "mine").json() == SUCCESS
    again = ended(gate, submit)
    gate.rig.restart("schedule.0")
    third = gate.submit()
    assert third.attempt == again.attempt + 1
    assert third.options.reasoning_budget == again.options.reasoning_budget
    gate.accept(third)
    gate.finish(third, "well.")
    assert '"well."' in stream.result().text


def test_what_can_not_be_ended_says_so(gate: Gate) -> None:
    assert "reasoning_control = true" in control(gate, "unknown").json()["message"]
    others = [gate.post(STREAM | {"reasoning_control": value}) for value in (False, None)]
    submits = [begin(gate) for _ in others]
    assert not control(gate, "mine").json()["success"]
    for submit in submits:
        gate.finish(submit, "Hm")
    assert all('"Hm"' in one.result().text for one in others)


def test_a_model_that_does_not_reason_goes_on(gate: Gate) -> None:
    stream = gate.post(STREAM)
    submit = begin(gate, None)
    assert control(gate, "mine").json() == SUCCESS
    gate.finish(submit, "Hm")
    assert '"Hm"' in stream.result().text


@pytest.mark.parametrize(
    ("body", "param"),
    [({"action": "stop", "id": "a"}, "action"), ({"id": "a"}, "action"), ({"action": "reasoning_end"}, "id")],
)
def test_bad_bodies_are_refused_by_name(gate: Gate, body: dict[str, Any], param: str) -> None:
    refused = gate.client.post(PATH, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_a_control_does_not_reach_requests_of_another_key(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        response = post(gate, KEY, STREAM)
        submit = begin(gate)
        body = {"action": "reasoning_end", "id": "mine"}
        assert not gate.client.post(PATH, json=body, headers=bearer(SECOND)).json()["success"]
        assert gate.client.post(PATH, json=body, headers=bearer(None)).status_code == 401
        assert gate.rig.nothing("schedule", 0)
        assert gate.client.post(PATH, json=body, headers=bearer(KEY)).json() == SUCCESS
        again = ended(gate, submit)
        gate.accept(again)
        gate.finish(again, "well.")
        assert response.result().status_code == 200


def test_another_gateway_ends_it(tmp_path: Path) -> None:
    with Gate(tmp_path, siblings=1) as gate:
        answer = gate.do(control, gate, "there")
        question = gate.rig.receive("gateway.1", m.AbortRequests)
        assert (question.names, question.ends_reasoning) == (["there"], True)
        gate.rig.send(m.RequestsAborted(1, question.nonce, [0]), "gateway.1")
        assert answer.result().json() == SUCCESS
        response = gate.post(STREAM)
        submit = begin(gate)
        gate.rig.send(m.AbortRequests(1, 8, ["mine"], "", True), "gateway.1")
        assert gate.rig.receive("gateway.1", m.RequestsAborted) == m.RequestsAborted(0, 8, [0])
        again = ended(gate, submit)
        gate.accept(again)
        gate.finish(again, "well.")
        assert response.result().status_code == 200


def test_a_control_is_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with Gate(tmp_path, record=recording) as gate:
        stream = gate.post(STREAM)
        submit = begin(gate)
        gate.delta(submit, "Hm, ", 2)
        assert control(gate, "mine").json() == SUCCESS
        again = ended(gate, submit)
        gate.accept(again)
        gate.finish(again, "well.")
        assert '"well."' in stream.result().text
        gate.rig.until(lambda load: load.num_open_requests == 0)
    replays_alike("gateway", recording)
    assert sum(b"submit" in one.body for one in entries(recording) if isinstance(one, f.Sent)) == 2
