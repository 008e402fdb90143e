"""Segments: sharing with a child, read-only mappings, reservations, and cleanup."""

import errno
import gc
import mmap
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pipeline.shm import segment

CHILD = """
import sys
from pipeline.shm import segment
fd, num_bytes = map(int, sys.argv[1:])
view = segment.attach(fd, num_bytes, writable=True)
assert bytes(view[:5]) == b"hello"
view[100:105] = b"world"
"""


@pytest.fixture
def fd():
    descriptor = segment.create("test", 1 << 20)
    yield descriptor
    os.close(descriptor)


def test_a_child_sees_the_bytes_and_its_writes_come_back(fd):
    view = segment.attach(fd, 1 << 20, writable=True)
    view[:5] = b"hello"
    subprocess.run([sys.executable, "-c", CHILD, str(fd), str(1 << 20)], pass_fds=[fd], check=True, timeout=60)
    assert bytes(view[100:105]) == b"world"


def test_a_read_only_mapping_rejects_writes(fd):
    view = segment.attach(fd, 1 << 20, writable=False)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    assert not np.frombuffer(view, np.int32).flags.writeable


def test_a_view_outlives_the_descriptor():
    fd = segment.create("test", mmap.PAGESIZE)
    view = segment.attach(fd, mmap.PAGESIZE, writable=True)
    os.close(fd)
    view[0] = 7
    assert view[0] == 7


def test_memory_is_reserved_when_the_segment_is_created(fd):
    assert os.fstat(fd).st_size == 1 << 20
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20


def test_a_descriptor_is_inherited_only_on_request(fd):
    assert not os.get_inheritable(fd)


def until_over(reservation: segment.Reservation) -> None:
    assert select.select([reservation], [], [], 30)[0], "the reservation did not end"


def test_a_reservation_completes_in_the_background():
    num_bytes = 3 * segment.PART_BYTES // 2
    reservation = segment.Reservation("swap", num_bytes, "execute.swap_bytes")
    view = segment.attach(reservation.fd, num_bytes, writable=True)
    view[-1] = 7  # usable meanwhile
    until_over(reservation)
    assert reservation.check()
    assert os.fstat(reservation.fd).st_blocks * 512 >= num_bytes
    assert view[-1] == 7 and view[0] == 0
    reservation.close()
    os.close(reservation.fd)


def test_a_cancelled_reservation_leaves_no_thread(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def allocate(*_):
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    reservation = segment.Reservation("swap", 2 * segment.PART_BYTES, "execute.swap_bytes")
    assert begun.wait(30)
    assert not reservation.check() and not select.select([reservation], [], [], 0)[0]
    threading.Timer(0.05, go_on.set).start()
    reservation.close()
    assert "reserve-swap" not in [thread.name for thread in threading.enumerate()]
    os.close(reservation.fd)


@pytest.mark.parametrize("others_bytes", [0, 1 << 50])
def test_a_reservation_beyond_the_available_memory_is_rejected_at_once(others_bytes):
    """Memory that other reservations still have to take does not count as available."""
    descriptors = sorted(Path("/proc/self/fd").iterdir())
    num_bytes = 1 << 20 if others_bytes else 1 << 50
    with pytest.raises(MemoryError, match=r"shared memory for swap.*lower execute\.swap_bytes, or free memory"):
        segment.Reservation("swap", num_bytes, "execute.swap_bytes", others_bytes)
    assert sorted(Path("/proc/self/fd").iterdir()) == descriptors


@pytest.mark.parametrize("by", ["what is free", "the kernel"])
def test_running_out_of_memory_during_a_reservation_is_an_error(monkeypatch, by):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space")

    free = iter([1 << 40, 1 << 40, 1 << 20])
    monkeypatch.setattr(segment, "available_bytes", lambda: next(free))
    if by == "the kernel":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    reservation = segment.Reservation("swap", 2 * segment.PART_BYTES, "execute.swap_bytes")
    until_over(reservation)
    with pytest.raises(
        MemoryError, match=r"128 MiB of shared memory for swap: only (65|0) MiB are available.*swap_bytes"
    ):
        reservation.check()
    reservation.close()
    os.close(reservation.fd)


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 62])
def test_too_large_a_segment_is_a_clear_error_and_reserves_nothing(num_bytes):
    descriptors = sorted(Path("/proc/self/fd").iterdir())
    words = r"cannot reserve \d+ MiB of shared memory for ingest\.3.* lower ingest\.arena_bytes"
    with pytest.raises(MemoryError, match=words):
        segment.create("ingest.3", num_bytes)
    assert sorted(Path("/proc/self/fd").iterdir()) == descriptors


def test_nothing_appears_in_the_file_system():
    before = set(Path("/dev/shm").iterdir())
    fd = segment.create("test", 1 << 16)
    view = segment.attach(fd, 1 << 16, writable=True)
    assert set(Path("/dev/shm").iterdir()) == before
    os.close(fd)
    del view
    gc.collect()
    assert set(Path("/dev/shm").iterdir()) == before
