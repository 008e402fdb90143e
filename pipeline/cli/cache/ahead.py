"""Prepares the default model while packages and kernels are compiled:  python -m pipeline.cli.cache.ahead

It ends with the process that started it, and removes then what is incomplete. If it fails, the server prepares the
model, and reports what is wrong.
"""

import ctypes
import importlib
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from pipeline.config.load import ConfigError, load
from pipeline.errors import UserError
from pipeline.runtime import topology

PROGRESS = "pipeline.stages.prepare.progress"
PR_SET_PDEATHSIG = 1
ENDS = (signal.SIGTERM, signal.SIGHUP)
"""The parent has ended, or its terminal was closed."""


def main() -> None:
    """Prepare, and end when the parent ends. Raises nothing that a user must see."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
    for number in ENDS:
        signal.signal(number, _interrupted)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent or parent == 1:
        return
    with suppress(UserError, ConfigError, OSError, KeyboardInterrupt):
        importlib.import_module(topology.PREPARE).prepare(load(), importlib.import_module(PROGRESS).Lines(sys.stdout))


def _interrupted(*_: object) -> NoReturn:
    for number in ENDS:
        signal.signal(number, lambda *_: None)  # with SIG_IGN, one that is pending would be an error
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
