"""Log lines on standard error: what logs does not wait for a reader that has stopped, and nothing is lost silently."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from pipeline.runtime.log import log_handler
from pipeline.runtime.log.log_handler import LogHandler
from pipeline.runtime.log.logs import KeyValueFormatter
from tests.rig import PATIENCE_S

PROGRAM = """
import os
from pipeline.runtime.log.logs import open_log

log = open_log("execute.0", "info")
for index in range(200):
    log.info("line", extra={"fields": {"index": index}})
os.kill(os.getpid(), 9)
"""
FORKS = """
import os
from pipeline.runtime.log.logs import open_log

log = open_log("execute.0", "info")
log.info("before")
if (child := os.fork()) == 0:
    log.info("in the child")
    os._exit(0)
os.waitpid(child, 0)
log.info("after")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def logger_of(fd: int) -> tuple[logging.Logger, LogHandler]:
    handler = LogHandler(os.fdopen(fd, "w", closefd=False))
    handler.setFormatter(KeyValueFormatter("gateway.0"))
    return logger_with(handler), handler


def logger_with(handler: LogHandler) -> logging.Logger:
    log = logging.getLogger("tests of the log handler")
    log.handlers, log.propagate = [handler], False
    log.setLevel("INFO")
    return log


def read_until(fd: int, text: bytes) -> bytes:
    found = b""
    while text not in found:
        found += os.read(fd, 1 << 16)
    return found


def test_nothing_waits_for_a_pipe_that_no_one_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_handler, "MAX_WAITING_BYTES", 64 * 1024)
    log, _ = logger_of(pipe[1])
    done = threading.Event()
    took_s: list[float] = []

    def flood() -> None:
        for index in range(5000):
            begin_s = time.thread_time()
            log.info("x" * 100, extra={"fields": {"index": index}})
            took_s.append(time.thread_time() - begin_s)
        done.set()

    threading.Thread(target=flood, daemon=True).start()
    assert done.wait(PATIENCE_S), "it hangs"
    assert max(took_s) < 0.05
    before = read_until(pipe[0], b"index=500")
    log.info("goes on")
    after = before + read_until(pipe[0], b"goes on")
    [dropped] = [line for line in after.splitlines() if b"log lines were dropped" in line]
    num = int(dropped.split(b"num=")[1].split()[0])
    assert num + after.count(b"index=") == 5000 and b"read more slowly" in dropped


def test_a_full_disk_costs_the_lines_of_that_time_only(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    log, handler = logger_of(pipe[1])
    room, write = 1 << 20, os.write

    def limited(fd: int, data: Any) -> int:
        nonlocal room
        if fd != pipe[1]:
            return write(fd, data)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num = write(fd, bytes(data)[:room])
        room -= num
        return num

    monkeypatch.setattr(os, "write", limited)
    log.info("one")
    room = 8
    for _ in range(3):
        log.info("lost")
    room = 1 << 20
    log.info("two")
    handler.flush()
    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert lines[0].endswith("I gateway.0 one") and lines[-1].endswith("I gateway.0 two")
    assert "log lines were dropped num=3 why='No space left on device'" in lines[-2]
    assert len(lines) == 4 and lines[0].startswith(lines[1][:2]) and len(lines[1]) == 8, "a part of a line is ended"


@pytest.mark.parametrize("machine", ["quiet", "busy"])
def test_lines_before_a_crash_are_there(machine: str) -> None:
    settings = f"from pipeline.runtime.log import log_handler\nlog_handler.BUSY_WAIT_S = {PATIENCE_S}\n"
    if machine == "busy":  # the thread does not get a core in time
        settings += "log_handler.WAIT_S = 0.0\n"
    program = settings + PROGRAM
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    assert done.returncode == -9 and done.stderr.count(b"line index=") == 200


def test_a_forked_process_writes_its_lines() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], stderr=subprocess.PIPE, check=True, timeout=PATIENCE_S)
    lines = [line.split(b" execute.0 ")[1] for line in done.stderr.splitlines()]
    assert lines == [b"before", b"in the child", b"after"]


def test_lines_are_written_if_no_thread_can_be_started(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log, _ = logger_of(pipe[1])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        log.info("without")
    log.info("with")
    assert [line.split()[-1] for line in os.read(pipe[0], 1 << 16).splitlines()] == [b"without", b"with"]


def test_a_terminal_that_another_process_has_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    log, _ = logger_of(pipe[1])
    for index in range(2000):
        log.info("x" * 100, extra={"fields": {"index": index}})
    assert read_until(pipe[0], b"index=1999").count(b"index=") == 2000


def test_a_stream_in_memory_has_the_lines() -> None:
    stream = StringIO()
    logger_with(LogHandler(stream)).info("a \udc80 b")
    assert stream.getvalue() == "a \\udc80 b\n"
