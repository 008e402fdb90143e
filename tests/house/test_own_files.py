"""Locks where others can write: their links, FIFOs and files are not opened, and nothing is emptied."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import own_files
from pipeline.kernels.cpu.build import _try_lock
from pipeline.own_files import OpenFolder, open_lock
from pipeline.runtime.model.model_folder import STAMP, hold, is_held, is_locked
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.sources.source import ModelError

Lock = Callable[[Path], object]


def fill(path: Path) -> None:
    with pytest.raises(ModelError, match="cannot write the cache"):
        Cache(path.parent).ensure("key", "a test", lambda _: None, print, 0.1)
    raise OSError


LOCKS: list[Lock] = [open_lock, fill, lambda path: Cache(path.parent).remove("key"), _try_lock]


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("planted", ["link", "link to nothing", "fifo", "folder", "another user's"])
def test_what_others_put_in_place_of_a_lock_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Lock, planted: str
) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    path = tmp_path / ".lock-key"
    match planted:
        case "link" | "link to nothing":
            path.symlink_to(victim if planted == "link" else tmp_path / "none")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.touch()
            monkeypatch.setattr(own_files, "is_trusted", lambda _: False)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError):
        lock(path)
    assert not is_locked(path)
    assert victim.read_text() == "precious" and not (tmp_path / "none").exists()
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208


def test_the_content_of_a_lock_stays(tmp_path: Path) -> None:
    """A hard link of another user may be any file."""
    (victim := tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock-key").hardlink_to(victim)
    Cache(tmp_path).ensure("key", "a test", lambda _: None, print, 1)
    assert victim.read_text() == "precious"


def test_a_fifo_or_a_device_in_place_of_a_stamp_blocks_nothing(tmp_path: Path) -> None:
    for number, plant in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        plant(folder / STAMP)
        assert Cache(tmp_path).lookup(folder.name) is None
        assert hold(folder) is None and not is_held(folder)


def test_an_open_folder_keeps_its_name(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    with OpenFolder(one) as opened:
        one.rename(tmp_path / "moved")
        (tmp_path / "other").mkdir()
        one.symlink_to("other")
        (opened.path / "file").touch()
    assert (tmp_path / "moved" / "file").exists() and not list((tmp_path / "other").iterdir())
