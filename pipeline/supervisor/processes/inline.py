"""Runs a stage as a thread of the supervisor's process, for debuggers and `pytest --pdb`: `pipeline serve --inline`.

Messages, sockets and shared memory are the same as with processes. But a thread can't be killed, and it can't be
profiled alone.
"""

import importlib
import logging
import os
import threading

import msgspec

from pipeline.errors import UserError
from pipeline.runtime.child import SINGLE_THREADED, report_failure
from pipeline.runtime.messages import Launch
from pipeline.supervisor.processes.child import Child

THREAD = "stage "
"""Prefix of the thread's name, before the stage's name; see logs.py."""


class InlineChild(Child):
    """A stage in a thread. `error` is the exception that it raised."""

    def __init__(self, launch: Launch, *, waits: bool = False) -> None:
        """Start it. If it `waits`, it runs after `begin`."""
        for key, value in SINGLE_THREADED.items():
            os.environ.setdefault(key, value)
        super().__init__(launch)
        self.pid = os.getpid()
        self.error: BaseException | None = None
        if launch.listen_fd >= 0:  # the stage closes its own copy
            launch = msgspec.structs.replace(launch, listen_fd=os.dup(launch.listen_fd))
        if launch.admin_fd >= 0:
            launch = msgspec.structs.replace(launch, admin_fd=os.dup(launch.admin_fd))
        self.pidfd, self._end = os.pipe()
        self._launch = launch
        self._begun = threading.Event()
        if not waits:
            self._begun.set()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD}{self.name}", daemon=True)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def begin(self, model_dir: str) -> None:
        self._launch = msgspec.structs.replace(self._launch, model_dir=model_dir)
        self._begun.set()

    def _run(self) -> None:
        self._begun.wait()
        launch = self._launch
        try:
            importlib.import_module(launch.entry).run(launch)
        except BaseException as error:
            self.error = error
            reason = str(error) or type(error).__name__
            if not isinstance(error, UserError):
                logging.getLogger("pipeline").exception("failed")
                reason = f"{type(error).__name__}: {reason}"
            report_failure(launch, reason)
        finally:
            os.close(self._end)

    @property
    def exit_code(self) -> int | None:
        return None if self._thread.is_alive() else int(self.error is not None)

    def describe_end(self) -> str:
        if self.is_alive:
            return "is running"
        return "ended" if self.error is None else f"raised {type(self.error).__name__}: {self.error}"

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self.is_alive

    def send_descriptors(self, epoch: int, fds: list[int]) -> bool:
        """Stages that are threads are not restarted."""
        raise NotImplementedError

    def kill(self) -> None:
        """A thread can't be killed; it ends with the process."""

    def close(self) -> None:
        if not self.is_alive:
            super().close()
