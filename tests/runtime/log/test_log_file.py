"""The file of the access log: rotation, several processes, and a disk that is slow or full."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.runtime.log import log_file
from pipeline.runtime.log.log_file import PIECE_BYTES, LogWriter, RotatingFile

PATIENCE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def write_many(path: Path, name: str, num: int) -> None:
    file = RotatingFile(path, 4000, 50)
    for i in range(num):
        file.write(f"{name} {i}\n".encode() * 2)


def lines_of(folder: Path) -> list[str]:
    return [line for file in folder.iterdir() for line in file.read_text().splitlines()]


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", 10, 2)
    for i in range(6):
        file.write(f"line {i}\n".encode())
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "log": "line 5\n",
        "log.1": "line 4\n",
        "log.2": "line 3\n",
    }
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_several_processes_append_and_rotate_without_losing_a_line(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(tmp_path / "log", name, 1000)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    assert sorted(lines_of(tmp_path)) == sorted(f"{name} {i}" for name in "abc" for i in range(1000) for _ in range(2))
    assert len(list(tmp_path.iterdir())) > 3
    assert all(one.stat().st_size <= 4100 for one in tmp_path.iterdir()), "all may write once more while one rotates"


def test_a_file_that_was_moved_is_begun_again(tmp_path: Path) -> None:
    """As logrotate does."""
    file = RotatingFile(tmp_path / "log", 10**6, 2)
    file.write(b"one\n")
    (tmp_path / "log").rename(tmp_path / "log-2026")
    file.write(b"two\n")
    (tmp_path / "log").unlink()
    file.write(b"three\n")
    assert sorted(lines_of(tmp_path)) == ["one", "three"]


def test_a_process_that_can_t_rotate_does_not_stop_others(tmp_path: Path) -> None:
    (tmp_path / "log.1").mkdir()
    (tmp_path / "log.1" / "not empty").mkdir()
    first, second = (RotatingFile(tmp_path / "log", 10, 1) for _ in range(2))
    first.write(b"line one\n")
    for file in (first, second, first):
        with pytest.raises(IsADirectoryError):
            file.write(b"line two\n")
    (tmp_path / "log.1").rename(tmp_path / "other")
    second.write(b"line two\n")
    first.write(b"end\n")
    assert (tmp_path / "log.1").read_text() == "line two\n" and (tmp_path / "log").read_text() == "end\n"


def test_a_process_that_is_stopped_while_it_rotates_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LOCK_S", 0.01)
    stopped, other = (RotatingFile(tmp_path / "log", 10, 1) for _ in range(2))
    other.write(b"line one\n")
    assert stopped._lock()
    other.write(b"line two\n")  # the file grows meanwhile
    assert (tmp_path / "log").read_text() == "line one\nline two\n"
    stopped.close()
    other.write(b"line three\n")
    assert (tmp_path / "log").read_text() == "line three\n"


def test_links_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "none/log"):
        with pytest.raises(OSError):
            RotatingFile(tmp_path / name, 10, 2)


class StuckFile:
    """A disk that takes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.written = b""
        self.is_full = False

    def write(self, data: bytes) -> None:
        self.released.wait(PATIENCE_S)
        if self.is_full:
            raise OSError(28, "No space left on device")
        assert len(data) <= PIECE_BYTES
        self.written += data

    def close(self) -> None:
        pass


def test_callers_never_wait_for_a_disk_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_WAITING_BYTES", 200_000)
    file = StuckFile()
    writer = LogWriter(file)  # type: ignore[arg-type]
    line = b"x" * 99 + b"\n"
    for _ in range(3000):
        writer.write(line)  # it would wait for ever
    assert writer.num_dropped == 1000, "no more than MAX_WAITING_BYTES wait, also those that are being written"
    file.released.set()
    until(lambda: len(file.written) == 200_000)
    writer.write(line)
    writer.close()
    assert file.written == line * 2001


def test_lines_that_can_t_be_written_are_counted() -> None:
    file = StuckFile()
    file.released.set()
    file.is_full = True
    writer = LogWriter(file)  # type: ignore[arg-type]
    for _ in range(5):
        writer.write(b"a\n")
    until(lambda: writer.num_dropped == 5)
    file.is_full = False
    writer.write(b"b\n")
    writer.close()
    assert file.written == b"b\n"


def test_lines_after_the_end_are_dropped_and_counted() -> None:
    """They would wait for ever, or begin another thread."""
    file = StuckFile()
    file.released.set()
    for num_before in (0, 1):
        writer = LogWriter(file)  # type: ignore[arg-type]
        for _ in range(num_before):
            writer.write(b"a\n")
        writer.close()
        for _ in range(3):
            writer.write(b"b\n")
        assert writer.num_dropped == 3 and not writer._lines
        assert writer._thread is None or not writer._thread.is_alive()
    assert file.written == b"a\n"


def test_a_line_after_one_that_the_disk_took_in_part_begins_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RotatingFile(tmp_path / "log", 10**6, 2)
    write, left = os.write, 3

    def full(fd: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        num = write(fd, data[:left])
        left -= num
        return num

    monkeypatch.setattr(os, "write", full)
    for line in (b"first\n", b"lost\n"):
        with pytest.raises(OSError):
            file.write(line)
    left = 1000
    file.write(b"second\n")
    file.write(b"third\n")
    left = 3
    with pytest.raises(OSError):
        file.write(b"ab\nlost")  # it ends with a whole line
    left = 1000
    file.write(b"last\n")
    assert (tmp_path / "log").read_bytes() == b"fir\nsecond\nthird\nab\nlast\n"
