"""One child process: started by exec, watched by its pidfd."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from pipeline.runtime import entry
from pipeline.runtime.messages import Launch

SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Library threads of the CPU stages would take the cores from the step. They have to be named before any import."""

THREADED = ("execute", "prepare")
"""Stages whose libraries may use every core they are given."""


class Child:
    """A stage's process. `state` is starting, ready, stopping or dead, and only the supervisor moves it."""

    def __init__(self, launch: Launch, num_threads: int) -> None:
        """Start it. Its descriptors are inherited by number; all others stay closed."""
        self.name = launch.name
        self.stage = launch.stage
        self.incarnation = launch.incarnation
        self.state = "starting"
        self.started_s = time.monotonic()
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)  # a launch fits a pipe; were it ever too big, an error is better than a hang
        data = msgspec.msgpack.encode(launch)
        try:
            num_written = os.write(write_fd, data)
            os.close(write_fd)
            assert num_written == len(data), "the launch does not fit the pipe"
            fds = [read_fd, launch.death_fd, *(segment.fd for segment in launch.segments)]
            fds += [fd for fd in (launch.listen_fd, launch.keys_fd, launch.admin_fd) if fd >= 0]
            threads = {key: str(num_threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(entry.__file__)), str(read_fd)],
                pass_fds=fds,
                # A terminal's Ctrl-C is for the supervisor, who tells the others; only the group that has the terminal
                # can read from it.
                stdin=None if launch.foreground else subprocess.DEVNULL,
                process_group=None if launch.foreground else 0,
                env=os.environ | SINGLE_THREADED | (threads if launch.stage in THREADED else {}),
            )
        finally:
            os.close(read_fd)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        """Readable when the process has ended."""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", perhaps by the system for want of memory" if -code == signal.SIGKILL else ""
            return f"was killed by {name}{hint}"
        return f"exited with code {code}"

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. Returns whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill and reap it, if it is alive."""
        if self.is_alive:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it if need be, and give back what it held here."""
        self.kill()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
