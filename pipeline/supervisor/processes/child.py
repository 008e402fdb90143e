"""A stage that the supervisor has started, wherever it runs."""

import os
import signal
import socket
import time
from abc import ABC, abstractmethod

from pipeline.runtime.messages import Launch
from pipeline.runtime.messages.lifecycle import EPOCH
from pipeline.runtime.process.process_usage import ProcessUsage, usage_of


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of most real-time signals
        return f"signal {number}"


class Child(ABC):
    """What the supervisor knows of a stage that it has started: a process (`ChildProcess`), a thread (`InlineChild`),
    a process on another host (`RemoteChild`), or a part of a process that several models share (`ModelGateway`).

    `state` is starting, recovering, joining, ready, leaving, sleeping, waking, stopping or dead; only the supervisor
    changes it. A child that replaces a dead one is recovering until it is ready. One that is added while the server
    serves is joining until it gets work, and one that is going to be removed is leaving. While the server sleeps, its
    executor has ended and is sleeping; its successor is waking until it is ready."""

    pidfd: int
    """Readable once it has ended; -1 after `close`."""

    def __init__(self, launch: Launch, *, node: str = "") -> None:
        """`node` is the host that it runs on, empty for this one."""
        self.name = launch.name
        self.stage = launch.stage
        self.incarnation = launch.incarnation
        self.node = node
        self.pid = 0
        """On its host; 0 until its process runs."""
        self.state = "starting"
        self.num_restarts = 0
        """How often this stage's process was replaced."""
        self.started_s = time.monotonic()
        self.suspended_s = 0.0
        """How long the supervisor was suspended, or the process compiled, while it started."""
        self.is_compiling = False
        self.is_lost = False
        """Its host was lost, so its end says nothing about it."""
        self._was_killed = False
        """By the supervisor."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether it runs, or still waits for `begin`."""

    @abstractmethod
    def begin(self, model_dir: str) -> None:
        """Let a child that waits run, with the folder of the prepared model."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """0 if it has ended as it should, negative if a signal has killed it; None while it runs."""

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def describe_end(self) -> str:
        """How it ended."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code < 0:
            name = signal_name(-code)
            if self._was_killed:
                return f"was killed by the supervisor ({name})"
            hint = ", perhaps because the system ran out of memory" if -code == signal.SIGKILL else ""
            return f"was killed by {name}{hint}"
        return f"exited with code {code}"

    @abstractmethod
    def send_descriptors(self, epoch: int, fds: list[int]) -> bool:
        """Send descriptors of a restart, before its `PeerRestarted`. Returns False if the socket is full. Raises
        ConnectionError if the process has closed it: it is ending, also if its pidfd does not tell yet."""

    def usage(self) -> ProcessUsage:
        """The resources that its process uses; zeros if it has ended."""
        return usage_of(self.pid)

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. Returns whether it ended in time."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once if it is alive."""

    def abort(self) -> None:
        """End it: it hangs. If it can, it writes the stacks of its threads to the log first."""
        self.kill()

    def close(self) -> None:
        """Kill it if it is alive, and close its descriptors."""
        self.kill()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class LocalChild(Child):
    """One in another process on this host, which gets descriptors over a socket: `_their_control` is the end of it that
    a subclass gives to the process, and closes."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._control, self._their_control = socket.socketpair()
        self._control.setblocking(False)

    def send_descriptors(self, epoch: int, fds: list[int]) -> bool:
        try:
            return socket.send_fds(self._control, [EPOCH.pack(epoch)], fds) == EPOCH.size
        except ConnectionError:
            raise
        except OSError:
            return False

    def close(self) -> None:
        super().close()
        self._control.close()
