"""A cache entry is complete or absent, also with concurrent processes and kills."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.config.settings import Settings
from pipeline.own_files import open_lock
from pipeline.runtime.model.model_folder import STAMP
from pipeline.stages.prepare import cache as module
from pipeline.stages.prepare.cache import Cache, _takes_lock, require_room
from pipeline.stages.prepare.sources.source import ModelError

PATIENCE_S = 30.0


def ensure(
    cache: Cache, fill: "object" = None, messages: list[str] | None = None, timeout_s: float = PATIENCE_S
) -> Path:
    return cache.ensure("key", "a test", fill or write, (messages if messages is not None else []).append, timeout_s)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    (folder / "a").write_bytes(b"12345")
    (folder / "deep").mkdir()
    (folder / "deep" / "b").write_bytes(b"678")


def never(folder: Path) -> None:
    raise AssertionError("a complete entry was filled again")


def test_an_entry_is_filled_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "not" / "there" / "yet")
    assert cache.lookup("key") is None
    folder = ensure(cache)
    assert (folder / "deep" / "b").read_bytes() == b"678"
    assert ensure(cache, never) == folder == cache.lookup("key")


@pytest.mark.parametrize("damage", ["cut", "gone", "stampless", "stamp cut", "stamp no text", "stamp odd", "file"])
def test_an_incomplete_entry_is_filled_again(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    folder = ensure(cache)
    match damage:
        case "cut":
            (folder / "a").write_bytes(b"12")
        case "gone":
            (folder / "deep" / "b").unlink()
        case "stampless":
            (folder / STAMP).unlink()
        case "stamp cut":
            (folder / STAMP).write_bytes((folder / STAMP).read_bytes()[:-3])
        case "stamp no text":
            (folder / STAMP).write_bytes(b'{"source": "\xff", "files": {}}')
        case "stamp odd":
            (folder / STAMP).write_bytes(b'{"source": "", "files": {"\\u0000": 1}}')
        case "file":
            shutil.rmtree(folder)
            folder.touch()
    assert cache.lookup("key") is None
    assert (ensure(cache) / "a").read_bytes() == b"12345"
    assert cache.lookup("key") == folder


def test_leftovers_in_the_place_of_an_entry_are_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".partial-key").touch()
    assert (ensure(Cache(tmp_path)) / "a").read_bytes() == b"12345"
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise ModelError("no")

    cache = Cache(tmp_path)
    with pytest.raises(ModelError, match="no"):
        ensure(cache, fail)
    assert list(tmp_path.iterdir()) == []
    ensure(cache)


CHILD = """
import sys
from pathlib import Path
from pipeline.stages.prepare.cache import Cache

def fill(folder):
    (folder / "a").write_bytes(b"half")
    print("half", flush=True)
    sys.stdin.read()

Cache(Path(sys.argv[1])).ensure("key", "a test", fill, print, 30.0)
"""


def test_a_killed_fill_is_repeated(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"half\n"
    cache = Cache(tmp_path)
    assert cache.lookup("key") is None
    with pytest.raises(ModelError, match=r"another process has held .*prepare_timeout_s"):
        ensure(cache, never, timeout_s=0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(PATIENCE_S)
    child.stdout.close()
    child.stdin.close()
    assert (ensure(cache) / "a").read_bytes() == b"12345"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_lock_whose_file_was_removed_while_others_waited_is_not_held(tmp_path: Path) -> None:
    """Else a waiting process would hold the removed file's lock, and a new one the new file's."""
    path = tmp_path / ".lock-key"
    with path.open("w") as old:
        path.unlink()
        assert not _takes_lock(old.fileno(), path)
        with path.open("w") as new:
            assert not _takes_lock(old.fileno(), path)
            assert _takes_lock(new.fileno(), path)
            with path.open("w") as other:
                assert not _takes_lock(other.fileno(), path)


def test_removing_leaves_no_lock_and_takes_nothing_from_one_that_has_begun_to_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    ensure(cache)
    assert cache.remove("key") and not list(tmp_path.iterdir())

    def late(path: Path) -> int:
        """Who held the lock removes its file, and another begins to fill the entry."""
        fd = open_lock(path)
        path.unlink()
        path.touch(0o600)
        (tmp_path / ".partial-key").mkdir()
        return fd

    monkeypatch.setattr(module, "open_lock", late)
    assert not cache.remove("key")
    assert (tmp_path / ".partial-key").is_dir() and (tmp_path / ".lock-key").exists()


@pytest.mark.parametrize("missing", ["a", "a/b/c"])
def test_a_cache_below_a_folder_that_can_t_be_created_is_an_error_that_names_cache_dir(missing: str) -> None:
    """As with a HOME that does not exist, or can only be read."""
    with pytest.raises(ModelError, match=r"cannot write the cache /proc/self/.* set cache_dir to a folder"):
        ensure(Cache(Path("/proc/self") / missing))


def test_of_two_concurrent_processes_one_fills_and_the_other_logs_that_it_waits(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    begun, waiting = threading.Event(), threading.Event()
    fills: list[Path] = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        begun.set()
        assert waiting.wait(PATIENCE_S)
        write(folder)

    first = threading.Thread(target=ensure, args=(cache, fill))
    first.start()
    assert begun.wait(PATIENCE_S)
    messages: list[str] = []

    def report(line: str) -> None:
        messages.append(line)
        waiting.set()

    folder = cache.ensure("key", "a test", fill, report, PATIENCE_S)
    first.join(PATIENCE_S)
    assert (len(fills), len(messages)) == (1, 1)
    assert "another process that is preparing" in messages[0]
    assert cache.lookup("key") == folder


def test_a_root_that_is_not_writable_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot write the cache .*set cache_dir"):
        ensure(Cache(tmp_path / "file" / "below"))


def test_a_root_of_an_unknown_user_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match=r"cache_dir '~no-such-user/x': .*home"):
        Cache.of(Settings(cache_dir="~no-such-user/x"))


def test_errors_of_the_fill_function_are_not_changed(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        Path("/no/such/model.gguf").read_bytes()

    with pytest.raises(FileNotFoundError, match=r"model\.gguf"):
        ensure(Cache(tmp_path), fill)


def test_too_little_disk_space_is_reported_with_both_numbers(tmp_path: Path) -> None:
    require_room(tmp_path, 1)
    with pytest.raises(ModelError, match=r"needs \d+ MiB in .* only \d+ MiB are free"):
        require_room(tmp_path, 1 << 60)


def test_the_root_is_the_setting_or_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Cache.of(Settings(cache_dir=str(tmp_path))).root == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache.of(Settings()).root == tmp_path / "xdg" / "pipeline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.of(Settings()).root == tmp_path / ".cache" / "pipeline"
