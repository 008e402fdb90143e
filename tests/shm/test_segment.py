"""Segments: what a child sees, what a reader may not do, and what is left behind."""

import gc
import mmap
import os
import subprocess
import sys
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


def test_a_read_only_mapping_refuses_writes(fd):
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


def test_a_descriptor_is_not_inherited_unless_asked_for(fd):
    assert not os.get_inheritable(fd)


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 62])
def test_too_large_a_segment_is_refused_in_words_and_reserves_nothing(num_bytes):
    descriptors = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(MemoryError, match=r"cannot reserve \d+ MiB of shared memory for ingest.*ingest\.arena_bytes"):
        segment.create("ingest", num_bytes)
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
