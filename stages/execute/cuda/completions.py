"""Waking the loop when a step is over.

A thread waits for the events of steps, one after the other, asleep and without the interpreter's lock, and turns a
descriptor readable for each. It does nothing else: sockets, shared memory and the recording's tape stay with the one
thread that owns them, and no lock is held while a step is launched.
"""

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

from pipeline.stages.execute.cuda.launched_step import LaunchedStep

STOP_S = 10.0
"""Longest that `close` waits for the step that the thread waits for."""


class Completions:
    """Owns the thread and the descriptor."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._launched_steps: SimpleQueue[LaunchedStep | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._thread.start()

    def put(self, launched_step: LaunchedStep) -> None:
        """Wake the loop when this one is over; it comes after all that were put before."""
        self._launched_steps.put(launched_step)

    def clear(self) -> None:
        """The loop has woken, and looks at all that is over now."""
        with suppress(BlockingIOError):  # woken by a message
            os.eventfd_read(self.fd)

    def close(self) -> None:
        self._launched_steps.put(None)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            os.close(self.fd)

    def _run(self) -> None:
        while (launched_step := self._launched_steps.get()) is not None:
            # The GPU's error comes to the loop as well, when it asks for the same event.
            with suppress(RuntimeError):
                if not launched_step.is_collected:
                    launched_step.wait()
            os.eventfd_write(self.fd, 1)
