"""A model that sleeps while another one has its turn is woken by its turn only."""

import logging
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.supervisor.restart.sleep import Sleeper
from pipeline.supervisor.run_mode import RunMode


@pytest.fixture
def sleeper() -> Sleeper:
    """Of a server whose executor and schedule are ready."""
    resources, table, restarts = MagicMock(settings=Settings(), saved_kv_fds={}), MagicMock(), MagicMock()
    table.children = {name: MagicMock(state="ready") for name in ("schedule.0", "execute.0")}
    restarts.planned.is_planned.return_value = False
    restarts.put_to_sleep.return_value = ""
    return Sleeper(RunMode(), resources, MagicMock(takes_changes=True), table, restarts, MagicMock(), logging.root)


def saved(**fields: Any) -> m.KVSaved:
    return m.KVSaved(**({"number": 1, "num_bytes": 7, "took_s": 0.0} | fields))


def test_only_its_turn_wakes_it(sleeper: Sleeper) -> None:
    answers: list[str] = []
    sleeper.set_turn(True, answers.append)
    sleeper.handle(saved(), "execute.0")
    assert answers == [""] and sleeper.phase == "asleep" and sleeper.saved_bytes == 7
    sleeper.change(False, False, answers.append)
    assert "while others have their turn" in answers[-1] and sleeper.phase == "asleep"
    sleeper.change(True, True, answers.append)
    sleeper.handle(m.WakeRequested(), "schedule.0")
    assert sleeper.phase == "asleep", "a request does not wake it"
    sleeper.set_turn(False, answers.append)
    sleeper.turn()
    assert sleeper.phase == "awake" and answers[-1] == "" and sleeper.saved_bytes == 0
    sleeper.change(True, False, answers.append)
    assert sleeper.phase == "saving"


def test_one_that_sleeps_on_request_takes_no_turns(sleeper: Sleeper) -> None:
    answers: list[str] = []
    sleeper.change(True, False, answers.append)
    sleeper.set_turn(True, answers.append)
    assert answers == ["it was put to sleep"]
    sleeper.handle(saved(), "execute.0")
    sleeper.change(False, False, answers.append)
    assert sleeper.phase == "waking"


def test_one_that_has_no_room_to_save_may_sleep_on_request_later(sleeper: Sleeper) -> None:
    answers: list[str] = []
    sleeper.set_turn(True, answers.append)
    sleeper.handle(saved(problem="no room"), "execute.0")
    assert answers == ["no room"] and sleeper.phase == "awake"
    sleeper.change(True, False, answers.append)
    assert sleeper.phase == "saving"
