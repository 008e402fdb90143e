"""The loop of a helper process that runs each job in a child of its own.

    owner ──job──► this process ──fork──► a child for each job ──its answer──► owner
                    one thread, what all jobs need is loaded      killed when its time is up

A child is forked in a few milliseconds. So a job that never ends, takes all memory or crashes a library just fails, and
the others go on. Slow jobs get a lower priority.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import time
import traceback
from collections import deque
from typing import Generic, Protocol, TypeVar

import psutil

from pipeline.runtime.process.process_usage import usage_of
from pipeline.runtime.workers.entry import die_with_parent

SHORT_S = 0.25
"""After this time, a job gets a lower priority."""

LOW_PRIORITY = 5
"""The nice value of slow jobs."""

MIN_CPU_S = 0.1
MIN_CPU_SHARE = 0.25
"""On a busy machine, a job that got less CPU time than this by its deadline gets more time: this share of its time
limit, or the seconds. If it gets no more until its last deadline, its failure says nothing about what was asked."""

MAX_EXTENDED_S = 5.0
"""Maximum duration of a job with such extensions, if its own time limit is not longer."""

MARGIN = 0.1
"""Fraction of the time limit that is reserved for returning the answer."""

STDERR, FIRST_FD = 2, 3
"""Descriptors: the second one is the first that is no standard stream."""

FAILED, NO_MEMORY = 1, 2
"""Exit codes of a child."""


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate at most `num_bytes` more. A larger allocation ends it, without a core file."""
    most = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class TimedJob(Protocol):
    @property
    def asked_s(self) -> float:
        """Time of the request, by time.monotonic()."""


J = TypeVar("J", bound=TimedJob)


class _Running(Generic[J]):
    """A job and its child process. The deadline is `limit_s` after the request. A job that had to wait gets at least
    half of that."""

    def __init__(self, job: J, pid: int, pipe: int, limit_s: float, max_extended_s: float) -> None:
        self.job, self.pid, self.pipe = job, pid, pipe
        self.began_s = time.monotonic()
        self.end_s = max(job.asked_s + limit_s, self.began_s + limit_s / 2)
        self.last_s = self.began_s + max(max_extended_s, limit_s)
        self.is_slow = False
        self.parts: list[bytes] = []


class Ended(Generic[J]):
    """How a job has ended. If its child failed, one of `is_late`, `lacked_memory` and `signal_name` is set, or none
    after another exception of `run`, which is in the log."""

    def __init__(self, run: _Running[J], is_late: bool, status: int, cpu_s: float, is_final: bool) -> None:
        """`status` is that of the child, as from `os.wait4`."""
        self.job = run.job
        self.answer = b"".join(run.parts)
        """What its child has written, maybe not all of it."""
        self.is_late = is_late
        """Whether the child was killed at its deadline."""
        self.lacked_memory = os.WIFEXITED(status) and os.WEXITSTATUS(status) == NO_MEMORY
        """Whether `run` raised MemoryError."""
        is_killed = os.WIFSIGNALED(status) and not is_late
        self.signal_name = signal.Signals(os.WTERMSIG(status)).name if is_killed else ""
        """The signal that ended the child, such as "SIGSEGV"."""
        self.cpu_s = cpu_s
        self.is_final = is_final
        """Whether the same job would end in the same way; False if a busy machine may have caused it."""


class ForkedJobs(Generic[J]):
    """The main loop and its state."""

    def __init__(
        self,
        owner: socket.socket,
        max_jobs: int,
        timeout_s: float,
        max_bytes: int,
        max_extended_s: float = MAX_EXTENDED_S,
    ) -> None:
        """`max_bytes`: the memory of a job, in addition to that of this process. `max_extended_s`: as
        MAX_EXTENDED_S."""
        self._owner = owner
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._limit_s = (1 - MARGIN) * timeout_s
        self._max_extended_s = max_extended_s
        self._min_cpu_s = max(MIN_CPU_S, MIN_CPU_SHARE * self._limit_s)
        self._waiting: deque[J] = deque()
        self._running: dict[int, _Running[J]] = {}
        """By the descriptor of the child's pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner, selectors.EVENT_READ)

    def next_job(self) -> J:
        """Read a job from the owner's socket. Raises WorkerLostError."""
        raise NotImplementedError

    def run(self, job: J) -> bytes:
        """Do a job, in its child. Returns the answer."""
        raise NotImplementedError

    def ended(self, end: Ended[J]) -> None:
        """Send the owner what has become of a job. Raises WorkerLostError."""
        raise NotImplementedError

    def descriptors(self, job: J) -> tuple[int, ...]:
        """Those that the child of a job keeps, besides the standard streams."""
        return ()

    def loop(self) -> None:
        """Run until the owner ends. Raises WorkerLostError then."""
        while True:
            for key, _ in self._selector.select(self._next_s()):
                if key.fileobj is self._owner:
                    self._waiting.append(self.next_job())
                else:
                    self._read(self._running[key.fd])
            self._watch()
            while self._waiting and len(self._running) < self._max_jobs:
                self._begin(self._waiting.popleft())

    def _next_s(self) -> float | None:
        """Seconds until the next job becomes slow or reaches its deadline."""
        now_s = time.monotonic()
        due = [run.end_s if run.is_slow else min(run.began_s + SHORT_S, run.end_s) for run in self._running.values()]
        return max(0.0, min(due) - now_s) if due else None

    def _begin(self, job: J) -> None:
        reads, writes = os.pipe()
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = FAILED
            try:
                die_with_parent(own_pid)
                # An open copy of the socket would hide the parent's death from the owner; others are of other jobs.
                _close_all_but(writes, *self.descriptors(job))
                limit_memory(self._max_bytes)
                with os.fdopen(writes, "wb") as out:
                    out.write(self.run(job))
                code = 0
            except MemoryError:
                code = NO_MEMORY
            except BaseException:  # noqa: BLE001 - the child ends here
                os.write(STDERR, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(writes)
        self._running[reads] = _Running(job, pid, reads, self._limit_s, self._max_extended_s)
        self._selector.register(reads, selectors.EVENT_READ)

    def _read(self, run: _Running[J]) -> None:
        if part := os.read(run.pipe, 2**20):
            run.parts.append(part)
        else:
            self._end(run, is_late=False)

    def _watch(self) -> None:
        """Lower the priority of slow jobs, and end those that are past their deadline."""
        now_s = time.monotonic()
        for run in list(self._running.values()):
            if now_s >= run.end_s and now_s < run.last_s and usage_of(run.pid).cpu_s < self._min_cpu_s:
                run.end_s = min(now_s + self._limit_s, run.last_s)
            elif now_s >= run.end_s:
                self._end(run, is_late=True)
            elif now_s >= run.began_s + SHORT_S and not run.is_slow:
                run.is_slow = True
                with contextlib.suppress(ProcessLookupError):
                    if os.getpriority(os.PRIO_PROCESS, run.pid) < LOW_PRIORITY:
                        os.setpriority(os.PRIO_PROCESS, run.pid, LOW_PRIORITY)

    def _end(self, run: _Running[J], *, is_late: bool) -> None:
        """Take the answer of a job whose child has closed its pipe, or kill the child."""
        self._selector.unregister(run.pipe)
        os.close(run.pipe)
        del self._running[run.pipe]
        if is_late:
            os.kill(run.pid, signal.SIGKILL)
        _, status, usage = os.wait4(run.pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime
        if is_late:
            is_final = cpu_s >= self._min_cpu_s
        else:  # from elsewhere, SIGKILL is for want of memory on the machine
            is_final = not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        self.ended(Ended(run, is_late, status, cpu_s, is_final))


def _close_all_but(*kept: int) -> None:
    """Close all descriptors but the standard streams and these."""
    begin = FIRST_FD
    for number in sorted(kept):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
