"""The supervisor's side of the fork server (pipeline/runtime/process/fork_server.py), and the processes it forks.

If there is none, if it does not answer, or if other code is installed now than it has imported, a stage's process is
started with exec instead: an interpreter of its own, with the same code."""

import contextlib
import ctypes
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.runtime import entry
from pipeline.runtime.child import SINGLE_THREADED
from pipeline.runtime.process.fork_server import MAX_BYTES, MAX_FDS, OUTDATED, Forked, Order

PR_SET_CHILD_SUBREAPER = 36
FIRST_ANSWER_S = 20.0
"""Maximum time for the imports and the first process, on a machine however busy."""
ANSWER_S = 3.0
"""Maximum time for a process to be forked. The supervisor does nothing else meanwhile."""
MAX_STARTS = 3
"""In `STARTS_S` seconds. A fork server that dies more often has a reason, which exec may not have."""
STARTS_S = 60.0


class Process(Protocol):
    """A process of ours: the part of `subprocess.Popen` that `Child` uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class ForkedProcess:
    """A process that the fork server has forked and the kernel has given to this one, as `subprocess.Popen` shows
    those that it has started."""

    def __init__(self, pid: int) -> None:
        """Raises ChildProcessError if it is no child of this process."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative if a signal has killed it; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored here, so its code is lost
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self.poll()) is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select_until_ended(pidfd, timeout)
            finally:
                os.close(pidfd)
            if (code := self.poll()) is None:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def select_until_ended(pidfd: int, timeout_s: float | None) -> None:
    """Wait until a process has ended, or for the timeout."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)


class ForkServer:
    """Starts the fork server, and another one when it has died. Several threads may use it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.RLock()
        """An order has the next answer, and only then may a process be given to this one."""
        self._starts_s: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._imported: set[str] = set()
        """Modules that it was asked to import, besides those of every stage."""
        self._start()

    @property
    def pid(self) -> int:
        """0 if there is none."""
        return 0 if self._process is None else self._process.pid

    def _start(self) -> None:
        now_s = time.monotonic()
        self._starts_s = [one for one in self._starts_s if now_s - one < STARTS_S] + [now_s]
        if len(self._starts_s) > MAX_STARTS:
            self._log.warning("the fork server has died too often; stages start with exec")
            return
        self._imported.clear()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(FIRST_ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(entry.__file__)), "--fork-server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=os.environ | SINGLE_THREADED,
            )

    def fork(self, environ: Mapping[str, str], fds: Sequence[int], *, checks_code: bool = True) -> ForkedProcess | None:
        """Fork a process that gets these descriptors: the first one is the pipe with its launch. Returns None if one
        must be started with exec. With `checks_code`, it has the code that is installed now."""
        with self._lock:
            return self._fork(environ, fds, checks_code=checks_code)

    def preload(self, modules: Sequence[str]) -> None:
        """Have it import modules that processes need which are forked later. Does not wait for it."""
        with self._lock:
            new = [name for name in modules if name not in self._imported]
            if self._process is None or not new:
                return
            self._imported.update(new)
            with contextlib.suppress(OSError):  # it has ended; the next process starts without
                order = Order(0, {}, [], os.getpid(), modules=new)
                self._connection.send(msgspec.msgpack.encode(order), socket.MSG_DONTWAIT)

    def _fork(self, environ: Mapping[str, str], fds: Sequence[int], *, checks_code: bool) -> ForkedProcess | None:
        order = Order(len(fds), dict(environ), sorted(os.sched_getaffinity(0)), os.getpid(), checks_code)
        answer = self._ask(order, fds)
        if answer is not None and answer.problem == OUTDATED:
            self._log.info("other code is installed now; starting the fork server again")
            self.close()
            self._start()
            answer = self._ask(order, fds)
        if answer is None:
            return None
        if answer.problem:
            self._log.debug(answer.problem)
            return None
        try:
            return ForkedProcess(answer.pid)
        except ChildProcessError:  # this kernel has no subreapers; the process ends by itself
            self._log.debug("a forked process is no child")
            self.close()
            return None

    def _ask(self, order: Order, fds: Sequence[int]) -> Forked | None:
        """Send an order. Returns None if there is no answer; then there is no fork server any more."""
        if self._process is None:
            return None
        # Of the whole process, so no longer than an order: orphans of other stages become children of this one, and are
        # not waited for.
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._connection, [msgspec.msgpack.encode(order)], fds[:MAX_FDS])
            for first in range(MAX_FDS, len(fds), MAX_FDS):
                socket.send_fds(self._connection, [b"+"], fds[first : first + MAX_FDS])
            data = self._connection.recv(MAX_BYTES)
            self._connection.settimeout(ANSWER_S)
        except OSError as error:
            self._log.debug(f"no answer of the fork server: {error}")
            data = self._last_answer()
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not data:
            self.close()
            return None
        return msgspec.msgpack.decode(data, type=Forked)

    def _last_answer(self) -> bytes:
        """Kill it. Returns what it has answered in the last moment, or nothing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._connection.setblocking(False)
        with contextlib.suppress(OSError):
            return self._connection.recv(MAX_BYTES)
        return b""

    def turn(self) -> None:
        """Start another one if it has died."""
        with self._lock:
            self._turn()

    def _turn(self) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self._log.warning(f"the fork server {how}; starting another one")
            self.close()
            self._start()

    def close(self) -> None:
        """End it."""
        with self._lock:
            if self._process is None:
                return
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None
