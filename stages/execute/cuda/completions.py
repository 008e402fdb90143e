"""Wakes the loop when a step is over.

A thread waits for the events of steps in order, without the GIL, and makes a descriptor readable for each. It does
nothing else: sockets, shared memory and the replay context stay with the thread that owns them, and no lock is held
while a step is launched.
"""

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

from pipeline.stages.execute.cuda.launched_step import LaunchedStep

STOP_S = 10.0
"""Timeout of `close` for the step that the thread waits for."""


class Completions:
    """Owns the thread and the descriptor."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._launched_steps: SimpleQueue[LaunchedStep | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._thread.start()

    def put(self, launched_step: LaunchedStep) -> None:
        """Wake the loop when this step is over. Steps are put in the order of their launch."""
        self._launched_steps.put(launched_step)

    def clear(self) -> None:
        """Reset the descriptor; the loop then collects every step that is over."""
        with suppress(BlockingIOError):  # a message woke the loop
            os.eventfd_read(self.fd)

    def close(self) -> None:
        self._launched_steps.put(None)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            os.close(self.fd)

    def _run(self) -> None:
        while (launched_step := self._launched_steps.get()) is not None:
            # The loop gets the GPU's error too, when it queries the same event.
            with suppress(RuntimeError):
                if not launched_step.is_collected:
                    launched_step.wait()
            os.eventfd_write(self.fd, 1)
