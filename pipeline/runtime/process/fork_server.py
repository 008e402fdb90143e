"""The fork server: a process that has imported what all stages share, and forks their processes.

An interpreter with the imports that all stages have in common costs 0.1 s of CPU time; a fork of a process that has
them, a few milliseconds. The fork server has no other thread, no ZeroMQ context, no CUDA and no secret. The supervisor
starts it, and orders processes from it (pipeline/supervisor/processes/fork_server.py):

    supervisor ──Order, descriptors──► fork server ──fork──► (a process between) ──fork──► stage
        ▲                                   │                  ends at once                  │
        └──────────── Forked ◄──────────────┴─── the stage goes on when that has ended ──────┘

The process between has ended before the supervisor gets the answer, so the kernel has made the stage a child of the
supervisor, which is a subreaper meanwhile: it waits for its exit code, and the stage's parent-death signal follows it.
So nothing happens to the stages when the fork server dies. A stage begins after the answer: if there is none, it ends.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
from pathlib import Path

import msgspec
import setproctitle

from pipeline.runtime.child import set_parent_death_signal

SHARED = (
    *("pipeline.replay.open_stage", "pipeline.runtime.stage", "pipeline.metrics.stats", "numpy"),
    *("asyncio", "uvloop", "pipeline.text.formats.chat_formats"),  # only two of the stages need these
)
"""What stages have in common, besides what `pipeline.runtime.child` imports. It must start no thread."""
MAX_BYTES = 64 * 1024
MAX_FDS = 200
"""In one message; the kernel allows 253."""
PID = struct.Struct("<i")
GO = b"+"
NO_PROCESS = "the process could not be forked"
OUTDATED = "other code is installed now"
HAS_THREADS = "a library has started threads"


class Order(msgspec.Struct, array_like=True, frozen=True):
    """Fork a process. Its descriptors come with this message and the next ones, at most `MAX_FDS` with each."""

    num_fds: int
    environ: dict[str, str]
    """Variables that it has besides those of the fork server."""
    cores: list[int]
    """On which the supervisor may run now."""
    parent: int
    """The supervisor's process id."""
    checks_code: bool = False
    """Refuse if other code is installed now than when the fork server began."""
    modules: list[str] = []
    """If there are any: fork nothing and answer nothing, but import these for the processes that are forked later."""


class Forked(msgspec.Struct, array_like=True, frozen=True):
    """The answer to an `Order`."""

    pid: int
    problem: str = ""
    """Why there is no process."""


class _Files:
    """The files of the modules that are imported, to notice that other code is installed."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int, int] | None] = {}
        self.add_new()

    def add_new(self) -> None:
        """More modules were imported."""
        self._files |= {file: self._state(file) for file in self._names() - self._files.keys()}

    def are_same(self) -> bool:
        """Whether they are still what was imported."""
        return all(self._state(file) == state for file, state in self._files.items())

    @staticmethod
    def _names() -> set[str]:
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        return {file for file in files if isinstance(file, str)}

    @staticmethod
    def _state(file: str) -> tuple[int, int, int] | None:
        try:
            found = Path(file).stat()
        except OSError:  # of modules in a zip file, for example
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def serve(connection: socket.socket) -> list[int]:
    """Fork processes until the supervisor closes its end. Returns in each of them only: the descriptors that it got, in
    the order in which they were sent."""
    set_parent_death_signal()
    setproctitle.setproctitle("pipeline: fork server")
    for name in SHARED:
        importlib.import_module(name)
    files = _Files()
    problem = _settle()
    while True:
        order, fds = _receive(connection)
        if order.modules:
            for name in order.modules:
                with contextlib.suppress(Exception):  # the process that needs it says why
                    importlib.import_module(name)
            files.add_new()
            problem = _settle()
        elif problem or (order.checks_code and not files.are_same()):
            _answer(connection, Forked(0, problem or OUTDATED))
        elif _fork(connection, order.parent):
            connection.close()
            os.environ.update(order.environ)
            _use(order.cores)
            os.setpgid(0, 0)
            return fds
        for fd in fds:
            os.close(fd)


def _settle() -> str:
    """All is imported for now. Returns why nothing can be forked, or an empty string."""
    gc.freeze()
    return "" if len(list(Path("/proc/self/task").iterdir())) == 1 else HAS_THREADS


def _fork(connection: socket.socket, parent: int) -> bool:
    """Fork, and answer. Returns True in the process that is to be a stage, which is a child of the supervisor then."""
    go_read, go_write = os.pipe()
    pid_read, pid_write = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid != 0:
            os.write(pid_write, PID.pack(pid))
            os._exit(0)
        for fd in (go_write, pid_read, pid_write):
            os.close(fd)
        if os.read(go_read, 1) != GO or os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)  # it has read nothing: the supervisor starts another one
        os.close(go_read)
        return True
    os.close(pid_write)
    os.close(go_read)
    pid = -1
    if between > 0:
        data = os.read(pid_read, PID.size)
        pid = PID.unpack(data)[0] if data else -1
        os.waitpid(between, 0)
    if _answer(connection, Forked(pid) if pid > 0 else Forked(0, NO_PROCESS)) and pid > 0:
        os.write(go_write, GO)
    os.close(pid_read)
    os.close(go_write)
    return False


def _receive(connection: socket.socket) -> tuple[Order, list[int]]:
    """The next order. Ends this process if the supervisor has closed its end."""
    data, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    order = msgspec.msgpack.decode(data, type=Order)
    while len(fds) < order.num_fds:
        data, more, _, _ = socket.recv_fds(connection, 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds += more
    return order, fds


def _answer(connection: socket.socket, answer: Forked) -> bool:
    """Returns False if the supervisor is gone, or does not wait any more."""
    try:
        connection.send(msgspec.msgpack.encode(answer))
    except OSError:
        return False
    return True


def _use(cores: list[int]) -> None:
    """Run on these cores, if the supervisor was moved since it started the fork server."""
    if os.sched_getaffinity(0) != set(cores):
        with contextlib.suppress(OSError):  # they are not there any more
            os.sched_setaffinity(0, cores)
