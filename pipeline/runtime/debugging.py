"""What a stage needs to be looked at in the terminal's foreground: `pipeline serve --foreground STAGE`.

The stage stays a child of the supervisor, in the supervisor's process group and with the terminal as its standard
input, so that `breakpoint()` in its code talks to the terminal. Ctrl-C is the supervisor's here too: the debugger
leaves it alone, for by itself it would take it after the first `continue`.
"""

import functools
import importlib
import inspect
import os
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from pipeline.errors import UserError


def install(break_at: str) -> None:
    """Make `breakpoint()` stop in a debugger that leaves signals alone, unless $PYTHONBREAKPOINT says otherwise; and
    stop at each call of the function that `break_at` names, as `pipeline.stages.schedule.scheduler:Scheduler.admit`.

    Raises UserError where there is no such function.
    """
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _stop_in_caller
    if break_at:
        _break_at(break_at)


def _stop_in_caller(*_: Any, **__: Any) -> None:
    frame: FrameType | None = sys._getframe().f_back
    _debugger().set_trace(frame)


def _debugger() -> pdb.Pdb:
    return pdb.Pdb(nosigint=True)


def _break_at(name: str) -> None:
    module_name, _, path = name.partition(":")
    *outer, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for part in outer:
            owner = getattr(owner, part)
        function: Callable[..., Any] = getattr(owner, last)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--break {name}: {error}; it needs MODULE:FUNCTION, as json:loads") from error
    if (
        not inspect.isfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        raise UserError(f"--break {name}: only plain functions and methods can be stopped at")

    @functools.wraps(function)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        return _debugger().runcall(function, *args, **kwargs)

    setattr(owner, last, stopped)
