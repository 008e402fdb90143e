"""What a process leaves behind when it dies: memory of the supervisor that the process writes, and that outlives it.

    breadcrumbs (one for each thread that works on requests) │ position │ the last log lines, as a ring │ suspects

A breadcrumb names the request that a thread is working on. It is set before the work and cleared after it, but not if
the work raises: then it stays, as after a kill. The suspects are the requests of work that is for many at once.
"""

import logging
import mmap
import os
import time
from array import array
from collections.abc import Collection
from struct import Struct
from typing import NamedTuple

from pipeline.runtime.log.log_handler import LogHandler
from pipeline.runtime.messages.lifecycle import BlackBox
from pipeline.shm import segment

CRUMB_BYTES = 64
MAX_THREADS = 4
"""Threads beside the loop that have a breadcrumb."""
NUM_CRUMBS = 1 + MAX_THREADS
LOG_BYTES = 64 * 1024
"""Of the ring of log lines."""
LOOP = 0
"""The breadcrumb of the stage's loop; those of the threads beside it follow."""

_CRUMB = Struct("<QQQ")
"""When the work began, in ns by time.monotonic, or 0 for none; the request's id; its attempt."""
_NONE = bytes(8)
_POSITION = Struct("<Q")
"""Number of bytes that were ever written to the ring."""
_POSITION_AT = CRUMB_BYTES * NUM_CRUMBS
_LOG_AT = _POSITION_AT + CRUMB_BYTES
MAX_SUSPECTS = 8192
"""More are not listed: twice as many as can run."""
_NUM_SUSPECTS = Struct("<Q")
_ID = Struct("<Q")
_SUSPECTS_AT = _LOG_AT + LOG_BYTES
NUM_BYTES = -(-(_SUSPECTS_AT + _NUM_SUSPECTS.size + MAX_SUSPECTS * _ID.size) // mmap.PAGESIZE) * mmap.PAGESIZE


class Suspect(NamedTuple):
    """The request that a process was working on when it died."""

    request_id: int
    attempt: int


def attach(box: BlackBox | None) -> memoryview:
    """The memory of a black box, zeros at first. Without one, private memory that has the same layout."""
    return memoryview(bytearray(NUM_BYTES)) if box is None else segment.attach(box.memory_fd, NUM_BYTES, writable=True)


class Breadcrumb:
    """Names the request that a thread is working on:

    with breadcrumb.at(request_id, attempt):
        …

    An error that leaves the block leaves the breadcrumb, because it ends the process.
    """

    def __init__(self, memory: memoryview, thread: int = LOOP) -> None:
        self._memory = memory[thread * CRUMB_BYTES :][:CRUMB_BYTES]

    def at(self, request_id: int, attempt: int) -> "Breadcrumb":
        """The thread begins to work on a request."""
        _CRUMB.pack_into(self._memory, 0, time.monotonic_ns(), request_id, attempt)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.clear()

    def clear(self) -> None:
        """The thread works on no request."""
        self._memory[: len(_NONE)] = _NONE


class SuspectList:
    """The requests that a process is working on together: if it dies, each of them may be the reason. An id may be
    listed several times."""

    def __init__(self, memory: memoryview) -> None:
        """`memory` is that of a black box."""
        self._memory = memory[_SUSPECTS_AT:]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, request_id: int) -> None:
        if self._num < MAX_SUSPECTS:
            _ID.pack_into(self._memory, _NUM_SUSPECTS.size + self._num * _ID.size, request_id)
            self._num += 1
            _NUM_SUSPECTS.pack_into(self._memory, 0, self._num)

    def replace(self, request_ids: Collection[int]) -> None:
        """List these, and no others."""
        ids = array("Q", request_ids)[:MAX_SUSPECTS]
        self._num = len(ids)
        self._memory[: _NUM_SUSPECTS.size + len(ids) * _ID.size] = _NUM_SUSPECTS.pack(len(ids)) + ids.tobytes()


class LogRing:
    """Keeps the last `LOG_BYTES` of the log lines."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        (self._position,) = _POSITION.unpack_from(memory, _POSITION_AT)

    def keep(self, data: bytes) -> None:
        self._position += max(0, len(data) - LOG_BYTES)
        data = data[-LOG_BYTES:]
        offset = self._position % LOG_BYTES
        first, rest = data[: LOG_BYTES - offset], data[LOG_BYTES - offset :]
        self._memory[_LOG_AT + offset : _LOG_AT + offset + len(first)] = first
        self._memory[_LOG_AT : _LOG_AT + len(rest)] = rest
        self._position += len(data)
        _POSITION.pack_into(self._memory, _POSITION_AT, self._position)


def keep_lines(log: logging.Logger, memory: memoryview) -> None:
    """Keep the last lines of a process's log, which `open_log` has set up."""
    for handler in log.handlers:
        if isinstance(handler, LogHandler):
            handler.keep = LogRing(memory).keep


# ------------------------------------------------------------------------------------------- read by the supervisor


def suspect_of(box: BlackBox) -> Suspect | None:
    """The request that the process was working on. If several threads were working, it is the request that was begun
    last: most deaths come soon."""
    return next(iter(breadcrumbs_of(box)), None)


def breadcrumbs_of(box: BlackBox) -> list[Suspect]:
    """The requests that the threads of the process were working on, the one that was begun last first. Each of them may
    be the reason of its death."""
    return breadcrumbs_in(os.pread(box.memory_fd, _POSITION_AT, 0))


def breadcrumbs_in(memory: bytes | memoryview) -> list[Suspect]:
    """The same, from the memory of a black box."""
    crumbs = [_CRUMB.unpack_from(memory, index * CRUMB_BYTES) for index in range(NUM_CRUMBS)]
    return [Suspect(request_id, attempt) for begun_ns, request_id, attempt in sorted(crumbs, reverse=True) if begun_ns]


def suspects_of(box: BlackBox) -> list[int]:
    """The ids of the requests that the process had listed, in no order."""
    memory = b""
    while memory != (again := os.pread(box.memory_fd, NUM_BYTES - _SUSPECTS_AT, _SUSPECTS_AT)):
        memory = again  # schedule, whose list also explains the executor's death, may be writing it
    return suspects_in(bytes(_SUSPECTS_AT) + memory)


def suspects_in(memory: bytes | memoryview) -> list[int]:
    """The same, from the memory of a black box."""
    (num,) = _NUM_SUSPECTS.unpack_from(memory, _SUSPECTS_AT)
    return list(set(array("Q", bytes(memory[_SUSPECTS_AT + _NUM_SUSPECTS.size :][: num * _ID.size]))))


def last_lines(box: BlackBox) -> bytes:
    """The last log lines of the process, in full."""
    data = os.pread(box.memory_fd, NUM_BYTES, 0)
    (position,) = _POSITION.unpack_from(data, _POSITION_AT)
    ring = data[_LOG_AT : _LOG_AT + LOG_BYTES]
    if position <= LOG_BYTES:
        return ring[:position]
    offset = position % LOG_BYTES
    return (ring[offset:] + ring[:offset]).partition(b"\n")[2]


def memory_of(box: BlackBox) -> bytes:
    """The memory of a black box, for one that is kept elsewhere."""
    return os.pread(box.memory_fd, NUM_BYTES, 0)


def stacks(box: BlackBox, max_bytes: int) -> bytes:
    """What faulthandler wrote, its first `max_bytes`."""
    return os.pread(box.stacks_fd, max_bytes, 0)
