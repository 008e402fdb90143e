"""Debug a stage in the terminal: `pipeline serve --foreground STAGE`.

The stage stays a child of the supervisor, but in its process group and with the terminal as standard input, so that
`breakpoint()` works. Ctrl-C still belongs to the supervisor: pdb must not handle it, which it does by default after
`continue`.
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
    """Make `breakpoint()` start a debugger that ignores signals, unless $PYTHONBREAKPOINT is set. Also stop at each
    call of the function `break_at`, such as `pipeline.stages.schedule.scheduler:Scheduler.admit`.

    Raises UserError if there is no such function.
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
        raise UserError(f"--break {name}: {error}; needs MODULE:FUNCTION, such as json:loads") from error
    if (
        not inspect.isfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        raise UserError(f"--break {name}: must be a plain function or method, not a coroutine or generator function")

    @functools.wraps(function)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        return _debugger().runcall(function, *args, **kwargs)

    setattr(owner, last, stopped)
