"""Recordings go to new files of this user; links and files that others have put there are not written to."""

import os
import stat
from pathlib import Path

import pytest

from pipeline.replay.recorder import FileWriter
from pipeline.runtime.private_files import create_private


def test_a_file_is_new_and_private(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for number in range(2):
        if number:
            path.chmod(0o666)
        readers = os.open(path, os.O_RDONLY) if number else -1
        fd = create_private(path)
        os.write(fd, b"%d" % number)
        os.close(fd)
        assert path.read_bytes() == b"%d" % number
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if number:
            assert os.read(readers, 10) == b"0", "who had opened the old file does not see the new one"
            os.close(readers)


def test_links_are_not_followed_to_files(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    for target in ("victim", "none"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(target)
        with pytest.raises(OSError, match=r"this is a link|No such file"):
            FileWriter(str(link))
    assert victim.read_text() == "precious" and not (tmp_path / "none").exists()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("x")])
def test_files_of_other_users_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    make(path := tmp_path / "theirs")  # type: ignore[operator]
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.lchown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        FileWriter(str(path))
    assert path.is_symlink() or path.exists()


def test_devices_and_own_pipes_are_opened_as_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    fds = [create_private(path) for path in (tmp_path / "fifo", "/dev/full")]
    os.write(fds[0], b"x")
    assert os.read(reader, 1) == b"x"
    for fd in (*fds, reader):
        os.close(fd)
    with pytest.raises(IsADirectoryError):
        create_private(tmp_path)
