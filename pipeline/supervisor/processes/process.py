"""A child process: forked by the fork server or started with exec, and watched by its pidfd."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from pipeline.runtime import entry
from pipeline.runtime.child import INTERRUPT, SINGLE_THREADED
from pipeline.runtime.messages import Launch
from pipeline.runtime.messages.lifecycle import LENGTH
from pipeline.runtime.process.descriptors import descriptors_of
from pipeline.supervisor.processes.child import LocalChild
from pipeline.supervisor.processes.fork_server import ForkServer, Process

ABORT_S = 0.5
"""Maximum time for a process that hangs to write its stacks."""

THREADED = ("execute", "prepare")
"""Stages whose libraries may use every core."""


def _environ(stage: str, num_threads: int) -> dict[str, str]:
    """The variables of a stage that others don't have."""
    if stage in THREADED:
        return {key: str(num_threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    # aiohttp reads the certificates of the system's authorities when it is imported, for 0.05 s. A gateway makes no
    # connections; it accepts certificates of gateway.ssl_ca_certs only.
    return {"SSL_CERT_FILE": os.devnull} if stage == "gateway" else {}


class ChildProcess(LocalChild):
    """A stage's process on this host."""

    def __init__(
        self, launch: Launch, num_threads: int, *, waits: bool = False, fork_server: ForkServer | None = None
    ) -> None:
        """Start the process. It has the descriptors that it needs, and no others. If it `waits`, it imports its code
        and then waits for `begin`. Without a `fork_server`, it is started with exec, as one with a terminal always
        is."""
        super().__init__(launch)
        self._begin_fd = -1
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)  # a launch always fits the pipe; an error is better than a hang
        launch = msgspec.structs.replace(launch, control_fd=self._their_control.fileno())
        data = msgspec.msgpack.encode(launch)
        data = LENGTH.pack(len(data)) + data
        try:
            num_written = os.write(write_fd, data)
            assert num_written == len(data), "the launch does not fit the pipe"
            fds = [read_fd, *descriptors_of(launch)]
            self._process = self._start(launch, fds, _environ(launch.stage, num_threads), fork_server)
        except BaseException:
            os.close(write_fd)
            self._control.close()
            raise
        finally:
            os.close(read_fd)
            self._their_control.close()
        self._begin_fd = write_fd
        if not waits:
            self._end_launch()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @staticmethod
    def _start(launch: Launch, fds: list[int], environ: dict[str, str], fork_server: ForkServer | None) -> Process:
        """Start a process with these descriptors, of which the first one is the pipe with its launch."""
        if fork_server is not None and not launch.foreground:
            # One that replaces another has the code that is installed then; see docs/recovery.md.
            forked = fork_server.fork(environ, fds, checks_code=bool(launch.wire_version))
            if forked is not None:
                return forked
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(entry.__file__)), str(fds[0])],
            pass_fds=fds,
            # Ctrl-C in a terminal is for the supervisor, which stops the others. Only the foreground group can read
            # from it.
            stdin=None if launch.foreground else subprocess.DEVNULL,
            process_group=None if launch.foreground else 0,
            env=os.environ | SINGLE_THREADED | environ,
        )

    @property
    def has_begun(self) -> bool:
        return self._begin_fd < 0

    def begin(self, model_dir: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended; its pidfd tells
            os.write(self._begin_fd, os.fsencode(model_dir))
        self._end_launch()

    def _end_launch(self) -> None:
        if self._begin_fd >= 0:
            os.close(self._begin_fd)
            self._begin_fd = -1

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask the process to end, if it listens to signals."""
        self._process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Let a process that still starts end, and remove what it has not completed on the disk."""
        self._process.send_signal(INTERRUPT)

    def kill(self) -> None:
        """Kill the process if it is alive, and reap it."""
        if self.is_alive:
            self._was_killed = True
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def abort(self) -> None:
        self._was_killed = True
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGABRT)
        if not self.wait(ABORT_S):
            self.kill()

    def close(self) -> None:
        super().close()
        self._end_launch()
