"""Files of packed weights: errors of the disk and of the system don't end the process."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_int
from pathlib import Path

import numpy as np
import pytest

from pipeline.kernels.cpu import native_library
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available

WAIT_S = 30.0


@pytest.fixture(scope="module")
def library() -> CDLL:
    return native_library.load(build(available()[0], print))


def run_refused(error: int, run: Callable[[], int]) -> int:
    """The result of a function in a thread whose calls of sync_file_range fail with `error`."""
    number = {"x86_64": 277, "aarch64": 84}[platform.machine()]
    load, equal, end = 0x20, 0x15, 0x06  # of the BPF machine
    program = [(load, 0, 0, 0), (equal, 0, 1, number), (end, 0, 0, 0x50000 | error), (end, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    libc = CDLL(None, use_errno=True)

    def refused() -> int:
        buffer = ctypes.create_string_buffer(code, len(code))
        filter = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
        no_new_privileges, set_seccomp, with_filter = 38, 22, 2
        zero = ctypes.c_ulong(0)
        assert libc.prctl(no_new_privileges, ctypes.c_ulong(1), zero, zero, zero) == 0
        assert libc.prctl(set_seccomp, ctypes.c_ulong(with_filter), filter) == 0
        return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(refused).result(WAIT_S)


@pytest.mark.parametrize(
    ("error", "result"), [(errno.ENOSYS, 0), (errno.EPERM, 0), (errno.EINVAL, 0), (errno.EIO, errno.EIO)]
)
def test_bytes_are_sent_to_the_disk_while_others_are_written(
    library: CDLL, tmp_path: Path, error: int, result: int
) -> None:
    """A system without this call writes the file too; an error of the disk is reported."""
    num_bytes = 20 * 4096 + 100
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    extents = np.array([(data.ctypes.data, num_bytes)], np.uint64)
    path, stopped = tmp_path / "file", c_int(0)
    with path.open("wb") as file:

        def write_file() -> int:
            return int(library.write_file(file.fileno(), extents.ctypes.data, 1, 4096, ctypes.byref(stopped)))

        assert run_refused(error, write_file) == result
        if not result:
            assert path.read_bytes() == data.tobytes()


def test_a_file_whose_pages_cannot_be_read_is_not_mapped(library: CDLL, tmp_path: Path) -> None:
    """As an error of the disk can't be had here, these pages are beyond the file's end."""
    path, page = tmp_path / "file", os.sysconf("SC_PAGESIZE")
    path.write_bytes(bytes(page))
    pool = native_library.ThreadPool(library, 1)
    with path.open("rb") as file:
        assert library.map_file(pool.handle, file.fileno(), 2 * page) is None
        address = library.map_file(pool.handle, file.fileno(), page)
    assert address is not None
    library.unmap_file(address, page)
    pool.close()
