"""Outputs of commands in folders where others write: what they planted is not opened, and nothing is half written."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.chat.conversation import ChatHistory
from pipeline.cli.check.kl_base import KlBaseFile
from pipeline.cli.out_file import PRIVATE, output, require_writable, write_output
from pipeline.cli.replay.traffic_command import TraceFile, write_trace
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from pipeline.own_files import NotOwn, OpenFolder, open_to_append
from pipeline.runtime.files.private_files import create_private
from tests.planting import give_away
from tests.rig import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def write_kl_base(path: Path) -> None:
    with KlBaseFile(str(path)):
        pass


def save_chat(path: Path) -> None:
    history = ChatHistory()
    history._saved.add(path.resolve())
    history.save(path)


WRITERS: list[Callable[[Path], object]] = [
    lambda path: write_output(path, "new"),
    lambda path: require_writable(path, "--out"),
    lambda path: write_trace(path, []),
    lambda path: TraceFile(path, 100),
    create_private,
    write_kl_base,
    save_chat,
    open_to_append,
]


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """A folder such as /tmp."""
    (folder := tmp_path / "tmp").mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("planted", ["link", "link to nothing", "file", "fifo", "link above"])
def test_what_others_planted_is_an_error(
    tmp_path: Path, sticky: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object], planted: str
) -> None:
    (mine := tmp_path / "mine").mkdir()
    (victim := mine / "out").write_text("precious")
    path = bait = sticky / "out"
    match planted:
        case "link" | "link to nothing":
            bait.symlink_to(victim if planted == "link" else mine / "none")
        case "file":
            bait.write_text("theirs")
        case "fifo":
            os.mkfifo(bait)
        case _:
            (bait := sticky / "folder").symlink_to(mine)
            path = bait / "out"
    give_away(bait, monkeypatch)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises((OSError, ConfigError, UserError), match=r"another user|this is a link|No such file"):
        write(path)
    assert victim.read_text() == "precious" and [one.name for one in mine.iterdir()] == ["out"]
    assert bait.is_symlink() or bait.is_fifo() or bait.read_text() == "theirs"
    assert [one.name for one in sticky.iterdir()] == [bait.name]
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208


def test_own_links_are_followed_and_stay(tmp_path: Path, sticky: Path) -> None:
    (tmp_path / "disk").mkdir()
    (sticky / "folder").symlink_to("../disk")
    (sticky / "link").symlink_to("folder/out")
    for text in ("one", "two"):
        write_output(sticky / "link", text)
        assert (tmp_path / "disk" / "out").read_text() == text
    assert (sticky / "link").is_symlink() and [one.name for one in (tmp_path / "disk").iterdir()] == ["out"]
    (sticky / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        write_output(sticky / "loop", "")


def test_the_owner_of_a_closed_folder_chooses_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a colleague, to which no one else can write, in a shared project."""
    (theirs := tmp_path / "theirs").mkdir(mode=0o755)
    (theirs / "results").symlink_to(tmp_path)
    if os.geteuid() == 0:
        os.lchown(theirs, 12345, 12345)
    give_away(theirs / "results", monkeypatch)
    write_output(theirs / "results" / "out", "new")
    assert (tmp_path / "out").read_text() == "new"


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    (path := tmp_path / "out").write_text("old")
    path.chmod(0o640)
    (tmp_path / "hard link").hardlink_to(path)
    with pytest.raises(RuntimeError), output(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_text() == "old"
        raise RuntimeError
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    write_output(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "hard link").read_text() == "old"
    write_output(path, "prompts", PRIVATE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_in_a_folder_without_new_files_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example one file that is mounted into a container. It is written to only if it is not another one by then."""
    (path := tmp_path / "out").write_text("older and longer")
    number, real = path.stat().st_ino, os.open

    def refused(name: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    require_writable(path, "--out")
    assert path.read_text() == "older and longer"  # the command has not begun its work
    write_output(path, "new")
    assert path.read_text() == "new" and path.stat().st_ino == number
    path.chmod(0o644)
    write_output(path, "prompts", PRIVATE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_ino == number


def test_a_mounted_file_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "out").write_text("older and longer")

    def busy(*_: object, **__: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    write_output(path, "new")
    assert path.read_text() == "new" and [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_modes_keeps_no_incomplete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "out").write_text("old")

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refused)
    require_writable(path, "--out")
    write_output(path, "new")
    assert path.read_text() == "new" and [one.name for one in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/dev/null"])
def test_descriptors_and_devices_are_written_to(path: str) -> None:
    code = "import sys; from pathlib import Path; from pipeline.cli.out_file import *\n"
    code += "require_writable(Path(sys.argv[1]), '--out'); write_output(Path(sys.argv[1]), 'text')"
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, timeout=PATIENCE_S, check=True)
    assert done.stdout == (b"" if path == "/dev/null" else b"text")


def test_a_new_folder_is_new_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        with OpenFolder.new(tmp_path / "new") as opened:
            assert stat.S_IMODE(os.fstat(opened.fd).st_mode) == 0o700
    finally:
        os.umask(before)
    with pytest.raises(FileExistsError):
        OpenFolder.new(tmp_path / "new")
    (other := tmp_path / "other").mkdir(mode=0o700)
    (other / "file").touch()
    real = Path.mkdir

    def swapped(path: Path, mode: int = 0o777) -> None:
        real(path, mode)
        path.rmdir()
        path.symlink_to(other) if path.name == "link" else other.rename(path)

    monkeypatch.setattr(Path, "mkdir", swapped)
    for name in ("link", "folder"):
        with pytest.raises(NotOwn):
            OpenFolder.new(tmp_path / name)
