"""A process on another host, as the supervisor sees it: the agent there starts and watches it."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.process.process_usage import NOTHING, ProcessUsage
from pipeline.supervisor.processes.child import Child

KILLED = -9


class Host(Protocol):
    """What a process needs of its host."""

    node: str
    model_dir: str

    def spawn(self, launch: m.Launch) -> None:
        """Start the process."""

    def send(self, message: m.HostInbox) -> None:
        """Send a message to the agent."""


class RemoteChild(Child):
    """A stage's process on another host. `pidfd` is an eventfd."""

    def __init__(self, launch: m.Launch, host: Host, receive: Callable[[float], None], *, waits: bool = False) -> None:
        """Start it. If it `waits`, it starts at `begin`. `receive` handles messages of agents for at most so many
        seconds."""
        super().__init__(launch, node=host.node)
        self._launch = launch
        self._host = host
        self._receive = receive
        self._exit_code: int | None = None
        self._reason = ""
        """Why it has ended, if its host was lost."""
        self._usage = NOTHING
        self._has_begun = False
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if not waits:
            self.begin("")

    @property
    def has_begun(self) -> bool:
        return self._has_begun

    def begin(self, model_dir: str) -> None:
        """Start the process, with the folder of the model that was prepared on its host."""
        self._has_begun = True
        self._host.spawn(msgspec.structs.replace(self._launch, model_dir=self._host.model_dir))

    def send_descriptors(self, epoch: int, fds: list[int]) -> bool:
        """Descriptors can't be sent to another host, and there are none."""
        assert not fds, f"{self.name} runs on another host and got descriptors"
        return True

    # -------------------------------------------------------------------------------------- what the agent reports

    def started(self, pid: int) -> None:
        self.pid = pid

    def used(self, usage: ProcessUsage) -> None:
        self._usage = usage

    def ended(self, exit_code: int, reason: str = "") -> None:
        """The process has ended. With a `reason`, its host was lost."""
        if self._exit_code is None:
            self._exit_code, self._reason, self.is_lost = exit_code, reason, bool(reason)
            os.eventfd_write(self.pidfd, 1)

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def describe_end(self) -> str:
        return self._reason or super().describe_end()

    def usage(self) -> ProcessUsage:
        """As the agent reported it last."""
        return self._usage if self.is_alive else NOTHING

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while self.is_alive and (left_s := end_s - time.monotonic()) > 0:
            self._receive(left_s)
        return not self.is_alive

    def kill(self) -> None:
        """Let the agent kill the process. A successor starts after that, because the agent does one after the other."""
        if self.is_alive:
            self._was_killed = True
            if self._has_begun:
                self._host.send(m.EndChild(self.name, self.incarnation, abort=False))
            self.ended(KILLED)

    def abort(self) -> None:
        """The agent reports the end."""
        self._was_killed = True
        self._host.send(m.EndChild(self.name, self.incarnation, abort=True))
