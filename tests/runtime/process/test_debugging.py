"""The functions that `--break` names, and `breakpoint()` in the foreground stage."""

import json
import pdb
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.runtime.process import debugging


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    before = sys.breakpointhook
    yield
    sys.breakpointhook = before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json:nothing", "has no attribute 'nothing'"),
        ("json:decoder.nothing.at_all", "has no attribute 'nothing'"),
        ("nowhere.at.all:x", "No module named 'nowhere'"),
        ("json", "needs MODULE:FUNCTION"),
        (":x", "needs MODULE:FUNCTION"),
        ("asyncio:sleep", "must be a plain function"),
        ("json:JSONDecoder", "must be a plain function"),
    ],
)
def test_break_at_rejects_what_is_not_a_plain_function(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"--break {name}: ") as error:
        debugging.install(name)
    assert words in str(error.value)


def test_a_debugger_runs_each_call_of_a_named_function_and_leaves_signals_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[bool, Any]] = []

    def runcall(self: pdb.Pdb, function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((self.nosigint, args))  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    monkeypatch.setattr(pdb.Pdb, "runcall", runcall)
    monkeypatch.setattr(json, "loads", json.loads)  # to restore it
    debugging.install("json:loads")
    assert json.loads("[1]") == [1]
    assert json.loads.__name__ == "loads"
    assert calls == [(True, ("[1]",))]


def test_breakpoint_stops_in_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: stopped.append(frame.f_code.co_name))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    debugging.install("")
    breakpoint()
    assert stopped == ["test_breakpoint_stops_in_its_caller"]


def test_another_debugger_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.breakpointhook
    monkeypatch.setenv("PYTHONBREAKPOINT", "web_pdb.set_trace")
    debugging.install("")
    assert sys.breakpointhook is before
