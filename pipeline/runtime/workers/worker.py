"""A helper process of a stage: started by exec, connected by a socket pair, and killed if it does not answer.

A message in either direction is a length (u32) and as many bytes.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.runtime.child import SINGLE_THREADED

ENTRY = Path(__file__).with_name("entry.py")
"""The script that the process runs; it imports this module."""
LENGTH = struct.Struct("<I")


class WorkerLostError(Exception):
    """The other side has ended, or did not answer in time."""


class Worker:
    """Runs `program`, a dotted module with `main(socket, *args)`, in a process of its own. The owner must `close` it.
    If the owner dies, the process ends too."""

    def __init__(self, program: str, title: str, args: Sequence[str] = (), fds: Sequence[int] = ()) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(ENTRY), str(theirs.fileno()), title, program, *args],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                process_group=0,  # only the supervisor gets a terminal's Ctrl-C
                env=os.environ | SINGLE_THREADED,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether another process killed it, or the kernel for want of memory: its own faults end it otherwise."""
        return self._process.poll() == -signal.SIGKILL

    def close(self) -> None:
        """Kill and reap the process."""
        self.socket.close()
        if self.is_alive:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def send(to: socket.socket, data: bytes) -> None:
    """Send a message. Raises WorkerLostError."""
    try:
        to.sendall(LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise WorkerLostError from error


def receive(source: socket.socket) -> bytes:
    """The next message. Raises WorkerLostError."""
    (length,) = LENGTH.unpack(receive_exactly(source, LENGTH.size))
    return receive_exactly(source, length)


def receive_exactly(source: socket.socket, num: int) -> bytes:
    """That many bytes. Raises WorkerLostError."""
    parts = []
    while num:
        try:
            part = source.recv(min(num, 2**20))
        except OSError as error:
            raise WorkerLostError from error
        if not part:
            raise WorkerLostError
        parts.append(part)
        num -= len(part)
    return b"".join(parts)
