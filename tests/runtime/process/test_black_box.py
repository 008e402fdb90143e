"""What a process writes into its black box is there for the supervisor after any kind of end."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.messages import BlackBox
from pipeline.runtime.process import black_box
from pipeline.supervisor.crashes.black_boxes import BlackBoxes


@pytest.fixture
def box() -> Iterator[BlackBox]:
    boxes = BlackBoxes(Settings())
    yield boxes.create("ingest.0", 1)
    boxes.close()


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("pipeline")
    before = log.handlers, log.level, log.propagate
    yield log
    log.handlers, log.level, log.propagate = before


DIES = """
import faulthandler, msgspec, os, signal, sys
from pipeline.runtime.process import black_box
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.messages import BlackBox

box = msgspec.json.decode(sys.argv[1], type=BlackBox)
memory = black_box.attach(box)
faulthandler.enable(box.stacks_fd)
log = open_log("ingest.0", "info")
black_box.keep_lines(log, memory)
log.info("the last line")
suspects = black_box.SuspectList(memory)
suspects.replace([1, 2, 3])
suspects.replace([0x1F3A])
suspects.add(2**63)
with black_box.Breadcrumb(memory).at(0x1F3A, 2):
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_it_survives_the_process(box: BlackBox, number: signal.Signals) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DIES, msgspec.json.encode(box).decode(), str(int(number))],
        pass_fds=box.fds,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -number
    assert black_box.suspect_of(box) == (0x1F3A, 2)
    assert sorted(black_box.suspects_of(box)) == [0x1F3A, 2**63]
    assert black_box.last_lines(box) == ended.stderr
    assert ended.stderr.endswith(b"I ingest.0 the last line\n")
    stacks = black_box.stacks(box, 10_000)
    assert (b"Fatal Python error: Aborted" in stacks) == (number == signal.SIGABRT)


def test_it_is_empty_at_first(box: BlackBox) -> None:
    assert black_box.suspect_of(box) is None
    assert black_box.suspects_of(box) == []
    assert black_box.last_lines(box) == black_box.stacks(box, 100) == b""


@pytest.mark.parametrize("num_lines", [10, 5_000])
def test_it_has_the_last_lines_in_full(
    box: BlackBox, log: logging.Logger, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log("ingest.0", "info")
    black_box.keep_lines(log, black_box.attach(box))
    for number in range(num_lines):
        log.info("é" * (number % 70), extra={"fields": {"number": number}})
    written = capsys.readouterr().err
    kept = black_box.last_lines(box).decode()
    assert written.endswith(kept)
    if num_lines == 10:
        assert kept == written
    else:
        assert black_box.LOG_BYTES - 200 < len(kept.encode()) < black_box.LOG_BYTES
        assert written[-len(kept) - 1] == "\n", "its first line is complete"


def test_a_line_longer_than_the_ring_does_not_break_it(box: BlackBox, log: logging.Logger) -> None:
    open_log("ingest.0", "info")
    black_box.keep_lines(log, black_box.attach(box))
    log.info("x" * 3 * black_box.LOG_BYTES)
    log.info("short")
    assert black_box.last_lines(box).endswith(b"I ingest.0 short\n")
    assert len(black_box.last_lines(box)) <= black_box.LOG_BYTES


def test_a_breadcrumb_is_cleared_after_the_work_but_not_by_an_error(box: BlackBox) -> None:
    breadcrumb = black_box.Breadcrumb(black_box.attach(box))
    with breadcrumb.at(7, 1):
        assert black_box.suspect_of(box) == (7, 1)
    assert black_box.suspect_of(box) is None
    with pytest.raises(RuntimeError), breadcrumb.at(2**64 - 1, 3):
        raise RuntimeError
    assert black_box.suspect_of(box) == (2**64 - 1, 3)


def test_of_two_threads_the_request_that_was_begun_last_is_suspected(box: BlackBox) -> None:
    memory = black_box.attach(box)
    loop, thread = black_box.Breadcrumb(memory), black_box.Breadcrumb(memory, black_box.MAX_THREADS)
    with thread.at(9, 1):
        with loop.at(5, 1):
            assert black_box.suspect_of(box) == (5, 1)
            assert black_box.breadcrumbs_of(box) == [(5, 1), (9, 1)]
        assert black_box.suspect_of(box) == (9, 1)
    assert black_box.suspect_of(box) is None


def test_each_process_has_a_file_for_its_recording_and_all_files_are_freed() -> None:
    boxes = BlackBoxes(Settings())
    first = boxes.create("ingest.0", 1)
    assert first.recording_fd >= 0
    other = boxes.create("schedule.0", 1)
    second = boxes.create("ingest.0", 2)
    assert second.recording_fd >= 0 and second.recording_bytes == Settings().supervisor.crash_recording_bytes
    assert boxes.get("ingest.0", 1) == first, "the process before may still serve"
    third = boxes.create("ingest.0", 3)
    assert boxes.get("ingest.0", 1) is None and boxes.get("ingest.0", 2) == second
    boxes.keep_only("ingest.0", 2)
    assert boxes.get("ingest.0", 3) is None and third != second
    files = {os.fstat(fd).st_ino for fd in (*second.fds, *other.fds)}
    assert files <= set(open_memfds()) and len(files) == 6
    boxes.close()
    assert not files & set(open_memfds())


def open_memfds() -> list[int]:
    """The inodes of this process's anonymous files."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [entry.stat().st_ino for entry in entries if str(entry.readlink()).startswith("/memfd:")]


def test_record_first_processes_off_records_only_successors() -> None:
    supervisor = msgspec.structs.replace(Settings().supervisor, record_first_processes=False)
    boxes = BlackBoxes(msgspec.structs.replace(Settings(), supervisor=supervisor))
    assert boxes.create("ingest.0", 1).recording_fd < 0
    assert boxes.create("ingest.0", 2).recording_fd >= 0
    boxes.close()


def test_crash_recording_bytes_of_0_makes_no_recording() -> None:
    settings = Settings()
    supervisor = msgspec.structs.replace(settings.supervisor, crash_recording_bytes=0)
    boxes = BlackBoxes(msgspec.structs.replace(settings, supervisor=supervisor))
    assert boxes.create("ingest.0", 2).recording_fd < 0
    boxes.close()


def test_more_suspects_than_have_room_are_left_out(box: BlackBox) -> None:
    suspects = black_box.SuspectList(black_box.attach(box))
    for request_id in range(black_box.MAX_SUSPECTS + 3):
        suspects.add(request_id)
    assert sorted(black_box.suspects_of(box)) == list(range(black_box.MAX_SUSPECTS))
    suspects.replace(range(black_box.MAX_SUSPECTS + 3))
    assert len(suspects) == len(black_box.suspects_of(box)) == black_box.MAX_SUSPECTS
    suspects.replace([])
    assert black_box.suspects_of(box) == []
