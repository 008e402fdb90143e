"""Files of others are read without blocking, mapping or trust in their size."""

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.runtime.files import regular_files
from pipeline.runtime.files.regular_files import RegularFile, open_regular, read_regular

MIB = 1024**2


@pytest.mark.parametrize("num_bytes", [0, 1, 5000])
def test_a_regular_file_is_read(tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "PART_BYTES", 999)
    data = os.urandom(num_bytes)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", num_bytes) == data
    if num_bytes:
        with pytest.raises(OSError, match=f"has {num_bytes} bytes; at most {num_bytes - 1} are allowed"):
            read_regular(tmp_path / "file", num_bytes - 1)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for path, words in (
        (tmp_path / "fifo", "a FIFO, not a regular file"),
        (tmp_path, "a folder, not a regular file"),
        (Path("/dev/zero"), "a device, not a regular file"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "nu\0l", "no file name"),
    ):
        with pytest.raises(OSError, match=words):
            read_regular(path, 100)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        (tmp_path / "link").symlink_to("none")
        open_regular(tmp_path / "link", os.O_NOFOLLOW)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_a_file_that_is_truncated_while_it_is_read_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    preadv = os.preadv

    def truncating(fd: int, buffers: Any, position: int) -> int:
        num = preadv(fd, buffers, position)
        os.truncate(path, 100)
        return num

    monkeypatch.setattr(regular_files, "PART_BYTES", 4096)
    monkeypatch.setattr(os, "preadv", truncating)
    assert read_regular(path, 10_000) == b"x" * 4096


def test_reading_has_a_deadline(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="took too long"):
        read_regular(tmp_path / "file", 10, time.monotonic() - 1)


def test_memory_for_a_large_file_is_not_touched_before_its_bytes_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching it holds Python's lock, for a second if a file has 700 MB; a read doesn't."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 * MIB)
    preadv, resident = os.preadv, []

    def reading(fd: int, buffers: Any, position: int) -> int:
        resident.append(psutil.Process().memory_info().rss)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", reading)
    before = psutil.Process().memory_info().rss
    with RegularFile(tmp_path / "file", 64 * MIB) as file_to_read:
        data = file_to_read.read_to(64 * MIB)
    assert len(data) == 64 * MIB and not any(data[:: MIB // 2])
    assert resident[0] - before < 16 * MIB
