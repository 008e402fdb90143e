"""Recordings go to new files of this user; links and files that others have put there are not written to."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.cli.replay.traffic_command import TraceFile
from pipeline.replay.recorder import FileWriter
from pipeline.runtime.files.private_files import create_private, open_output
from tests.rig import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


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


def test_a_command_waits_for_the_reader_of_its_fifo(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device"):
        create_private(path)  # a stage does not wait
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(TraceFile, path, 1000)
        with path.open("rb") as reader:
            file = opened.result(PATIENCE_S)
            file.add([])
            file.close()
            assert reader.read() == b"" and path.is_fifo()


WRITE = """
import sys
from pathlib import Path
from pipeline.cli.replay.traffic_command import TraceFile
print("before", flush=True)
file = TraceFile(Path(sys.argv[1]), 1000)
file._file.write(b"line\\n")
file.close()
print("after", flush=True)
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("to", ["file", "pipe"])
def test_a_command_writes_to_its_own_descriptors(tmp_path: Path, path: str, to: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    with (tmp_path / "out").open("w+") as out:
        done = subprocess.run(
            [sys.executable, "-c", WRITE, str(tmp_path / path)],
            stdout=out if to == "file" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE_S,
            check=False,
        )
        out.seek(0)
        written = out.read() if to == "file" else done.stdout
    assert (done.returncode, written) == (0, "before\nline\nafter\n"), done.stderr
    with pytest.raises(OSError, match="not open for writing"), (tmp_path / "out").open("rb") as reader:
        open_output(f"/dev/fd/{reader.fileno()}")


def test_a_stage_writes_to_none_of_its_descriptors(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file, pytest.raises(OSError, match="this is a link"):
        create_private(f"/dev/fd/{file.fileno()}")
