"""Requests are submitted again when a stage has died, except for those that kill it."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import COMPLETION, Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


@pytest.mark.parametrize("has_output", [False, True])
def test_a_request_that_kills_a_stage_fails_and_its_neighbour_is_served(gate: Gate, has_output: bool) -> None:
    """The supervisor says so, before the gateway learns of the successor."""
    poison = gate.complete(COMPLETION | {"prompt": "poison"})
    failing = gate.submit()
    neighbour = gate.complete(COMPLETION)
    gate.submit()
    if has_output:
        gate.accept(failing)
        gate.delta(failing, "some")
        gate.rig.load()
    error = f"schedule died 3{m.DIED_OF_REQUEST}"
    gate.rig.send(m.FailRequests({failing.request_id: error, 5: error}))
    response = poison.result()
    assert response.status_code == 500
    assert response.json()["error"] == {"message": error, "type": "server_error", "param": None, "code": "stage_died"}
    assert gate.rig.receive("schedule", m.Abort) == m.Abort(failing.request_id, failing.attempt)
    assert gate.rig.receive("schedule", m.Closed) == m.Closed(failing.request_id, failing.attempt)
    gate.rig.restart("schedule.0")
    last = gate.submit()
    assert last.request_id != failing.request_id
    gate.accept(last)
    gate.delta(last, "fine", finish=m.Finish.LENGTH)
    assert neighbour.result().json()["choices"][0]["text"] == "fine"
    with pytest.raises(TimeoutError):
        gate.rig.receive("ingest", m.Submit, timeout_s=0.1)


def test_the_client_gets_the_same_error_if_schedule_says_first_that_its_request_has_failed(gate: Gate) -> None:
    poison = gate.complete(COMPLETION)
    failing = gate.begin()
    error = f"execute died 4{m.DIED_OF_REQUEST}"
    gate.delta(failing, "", 0, finish=m.Finish.ERROR, error=error)
    assert poison.result().json()["error"] == {
        "message": error,
        "type": "server_error",
        "param": None,
        "code": "stage_died",
    }
    gate.rig.send(m.FailRequests({failing.request_id: error}))
    gate.rig.load()


def test_each_attempt_of_a_request_is_submitted_only_once(gate: Gate) -> None:
    response = gate.complete(COMPLETION)
    submit = gate.submit()
    for _ in range(4):
        gate.rig.restart("ingest.0")
        before, submit = submit, gate.submit()
        assert submit == msgspec.structs.replace(before, attempt=before.attempt + 1)
    gate.accept(submit)
    gate.delta(submit, "fine", finish=m.Finish.LENGTH)
    assert response.result().status_code == 200


def test_schedule_learns_again_which_requests_are_closed(gate: Gate) -> None:
    """Its successor may have run them before the gateway learned of it."""
    response = gate.complete(COMPLETION)
    submit = gate.submit()
    gate.accept(submit)
    gate.delta(submit, "fine", finish=m.Finish.LENGTH)
    assert response.result().status_code == 200
    closed = gate.rig.receive("schedule", m.Closed)
    assert closed == m.Closed(submit.request_id, submit.attempt)
    gate.rig.restart("schedule.0")
    assert gate.rig.receive("schedule", m.Closed) == closed


def test_an_accepted_request_is_submitted_again_by_its_ids(gate: Gate) -> None:
    """The gateway keeps neither the text nor what was cut off."""
    response = gate.complete(COMPLETION | {"prompt": "long " * 50, "truncate_prompt_tokens": 3})
    submit = gate.begin()
    assert submit.prompt == m.TextPrompt("long " * 50) and submit.prompt_options.truncate == 3
    gate.delta(submit, "a")
    gate.rig.load()
    gate.rig.restart("schedule.0")
    again = gate.submit()
    assert again.prompt == m.IdsPrompt(np.arange(3, dtype=np.int32).tobytes())
    assert again.prompt_options == m.PromptOptions()
    assert again.outputs == [np.zeros(1, np.int32).tobytes()]
    gate.delta(again, "b", finish=m.Finish.LENGTH)
    assert response.result().json()["choices"][0]["text"] == "ab"
