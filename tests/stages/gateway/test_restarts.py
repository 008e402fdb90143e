"""A request that a stage was working on when it died: it is submitted again once, and fails at the second death."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.request import CLEARING_IDS
from tests.stages.gateway.gate import COMPLETION, Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


@pytest.mark.parametrize("stage", ["ingest", "schedule"])
def test_a_request_that_kills_a_stage_twice_fails_and_its_neighbour_is_served(gate: Gate, stage: str) -> None:
    poison = gate.complete(COMPLETION | {"prompt": "poison"})
    suspect = gate.submit()
    neighbour = gate.complete(COMPLETION)
    gate.submit()
    gate.rig.restart(f"{stage}.0", suspect=suspect.request_id)
    again = [gate.submit(), gate.submit()]
    assert suspect.request_id in {one.request_id for one in again}, "one death may be a coincidence"
    gate.rig.restart(f"{stage}.0", suspect=suspect.request_id)
    response = poison.result()
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("stage_died", "server_error")
    assert error["message"] == f"{stage} died 2 times while it worked on this request"
    last = gate.submit()
    assert last.request_id != suspect.request_id
    gate.accept(last)
    gate.delta(last, "fine", finish=m.Finish.LENGTH)
    assert neighbour.result().json()["choices"][0]["text"] == "fine"
    with pytest.raises(TimeoutError):
        gate.rig.receive("ingest", m.Submit, timeout_s=0.1)


def test_a_request_that_ingest_has_in_a_thread_does_not_fail_for_another_one(gate: Gate) -> None:
    """Ingest works on both alone from then on, and only one that kills it then fails."""
    poison = gate.complete(COMPLETION | {"prompt": "poison"})
    guilty = gate.submit()
    neighbour = gate.complete(COMPLETION)
    other = gate.submit()
    assert not guilty.is_suspect and not other.is_suspect
    for _ in range(4):
        gate.rig.restart("ingest.0", suspects=[guilty.request_id, other.request_id])
        assert [gate.submit().is_suspect for _ in range(2)] == [True, True]
    gate.rig.restart("ingest.0", suspect=guilty.request_id)
    assert len({gate.submit().request_id for _ in range(2)}) == 2
    gate.rig.restart("ingest.0", suspect=guilty.request_id)
    assert poison.result().status_code == 500
    last = gate.submit()
    assert last.request_id == other.request_id
    gate.accept(last)
    gate.delta(last, "fine", finish=m.Finish.LENGTH)
    assert neighbour.result().json()["choices"][0]["text"] == "fine"


def test_a_request_that_kills_detokenize_twice_fails_and_schedule_forgets_it(gate: Gate) -> None:
    """Until then, schedule tells each successor of it again."""
    poison = gate.complete(COMPLETION)
    suspect = gate.submit()
    gate.accept(suspect)
    for _ in range(2):
        gate.rig.restart("detokenize.0", suspect=suspect.request_id)
    response = poison.result()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "detokenize died 2 times while it worked on this request"
    assert gate.rig.receive("schedule", m.Abort) == m.Abort(suspect.request_id, suspect.attempt)
    assert gate.rig.receive("schedule", m.Closed) == m.Closed(suspect.request_id, suspect.attempt)


def test_requests_that_were_not_in_work_get_no_strikes(gate: Gate) -> None:
    response = gate.complete(COMPLETION)
    submit = gate.submit()
    for _ in range(4):
        gate.rig.restart("ingest.0", suspect=submit.request_id ^ 1)
        before, submit = submit, gate.submit()
        assert submit == msgspec.structs.replace(before, attempt=before.attempt + 1), "each is submitted only once"
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


def test_a_request_that_is_the_last_suspect_of_three_deaths_of_schedule_fails(gate: Gate) -> None:
    """Those that died with it are submitted again, with the number of deaths."""
    poison, neighbour = gate.complete(COMPLETION | {"prompt": "poison"}), gate.complete(COMPLETION)
    submits = {one.prompt: one for one in (gate.submit(), gate.submit())}
    guilty, other = (submits[m.TextPrompt(text)].request_id for text in ("poison", COMPLETION["prompt"]))
    for num_deaths, suspects in enumerate(([guilty, other, 5], [guilty, other]), 1):
        gate.rig.restart("schedule.0", suspects=suspects)
        again = [gate.submit(), gate.submit()]
        assert {one.request_id: one.num_schedule_deaths for one in again} == {guilty: num_deaths, other: num_deaths}
    gate.rig.restart("schedule.0", suspects=[guilty])
    response = poison.result()
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["message"] == "schedule died 3 times while it worked on this request"
    assert (error["code"], error["type"]) == ("stage_died", "server_error")
    last = gate.submit()
    assert (last.request_id, last.num_schedule_deaths) == (other, 2)
    gate.accept(last)
    gate.delta(last, "fine", finish=m.Finish.LENGTH)
    assert neighbour.result().json()["choices"][0]["text"] == "fine"


def test_a_suspect_with_enough_new_ids_is_cleared(gate: Gate) -> None:
    """The last ids before a death may have been lost, so one or two more show nothing."""
    response = gate.complete(COMPLETION)
    submit = gate.submit()
    for num_deaths in (1, 2):
        gate.rig.restart("schedule.0", suspects=[submit.request_id])
        submit = gate.submit()
        assert submit.num_schedule_deaths == num_deaths
    gate.accept(submit)
    gate.delta(submit, "a", CLEARING_IDS - 1)
    gate.rig.load()
    gate.rig.restart("schedule.0")
    submit = gate.submit()
    assert submit.num_schedule_deaths == 2
    gate.delta(submit, "b")
    gate.rig.load()
    gate.rig.restart("schedule.0", suspects=[submit.request_id])
    submit = gate.submit()
    assert submit.num_schedule_deaths == 1
    gate.delta(submit, "", finish=m.Finish.LENGTH)
    assert response.result().status_code == 200


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
