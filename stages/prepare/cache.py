"""The cache on disk: an entry is a folder that is either complete or absent.

    absent ──lock──► .partial-<key> ──fill──► stamped ──rename──► <key> ──file missing or of another size──► absent

A complete entry has a stamp that lists every file with its size, and all files have that size. The stamp is written
last, then the folder is renamed. While it is filled it is open, and only its user can enter it: files reach no other
folder, also if other users rename what is in the cache. A process that is killed leaves a `.partial-` folder and its
lock's file; the next holder of the entry's lock removes both. The kernel releases the lock (flock) when its process
ends.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pipeline.config.settings import Settings
from pipeline.own_files import NotOwn, OpenFolder, make_folder, open_lock
from pipeline.runtime.files.cache_path import cache_path
from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.model.model_folder import MAX_STAMP_BYTES, PANELS, STAMP, is_held
from pipeline.stages.prepare.sources.source import ModelError, expanded

POLL_S = 0.05


class Stamp(msgspec.Struct, frozen=True):
    """The contents of `complete.json`."""

    source: str
    """Where the model came from; informational."""
    files: dict[str, int]
    """Sizes in bytes by relative path."""


class Cache:
    """Entries below one root. Raises ModelError if the root can't be written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, settings: Settings) -> "Cache":
        return cls(expanded(str(cache_path(settings)), "cache_dir").absolute())

    def lookup(self, key: str) -> Path | None:
        """The folder of a complete entry, whose modification time becomes now, or None."""
        folder = self.root / key
        try:
            stamp = msgspec.json.decode(read_regular(folder / STAMP, MAX_STAMP_BYTES), type=Stamp)
            complete = _has_only_files(folder) and all(
                (folder / name).stat().st_size == size for name, size in stamp.files.items()
            )
        except (OSError, ValueError):  # a missing or broken stamp: `ensure` fills the entry again
            return None
        if not complete:
            return None
        with suppress(OSError):  # a cache that may only be read has no time of use
            os.utime(folder)
        return folder

    def ensure(
        self, key: str, source: str, fill: Callable[[Path], None], say: Callable[[str], None], timeout_s: float
    ) -> Path:
        """The folder of the entry `key`. If it isn't complete, `fill` writes it into an empty folder first.

        One process fills an entry. Others wait for at most `timeout_s` and report it with `say`.
        """
        if (found := self.lookup(key)) is not None:
            return found
        with self._writable() as root, self._lock(root, key, say, timeout_s):
            if (found := self.lookup(key)) is not None:
                return found
            partial = root / f".partial-{key}"
            _remove(partial)
            try:
                with OpenFolder.new(partial) as opened, _names(opened, self.root / partial.name):
                    fill(opened.path_of_children)
                    _stamp(opened, source)
                    if not os.path.samestat(partial.lstat(), os.fstat(opened.fd)):
                        raise NotOwn(errno.EPERM, "another user has replaced this folder", str(partial))
                _remove(root / key)
                partial.rename(root / key)
            finally:
                _remove(partial)
        return self.root / key

    def remove(self, key: str) -> bool:
        """Remove an entry, or what a killed process left of one. Returns False if it is used: a process is filling it,
        or a server has it. Raises OSError."""
        with OpenFolder(self.root) as opened, _names(opened, self.root):
            path = opened.path / f".lock-{key}"
            with os.fdopen(open_lock(path), "rb") as file:
                if not _takes_lock(file.fileno(), path):
                    return False
                try:
                    return _remove_entry(opened.path / key, opened.path / f".partial-{key}")
                finally:
                    path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, root: Path, key: str, say: Callable[[str], None], timeout_s: float) -> Iterator[None]:
        """Hold the lock of an entry. Its file is removed at the end, whether the entry was filled or not."""
        path = root / f".lock-{key}"
        end = time.monotonic() + timeout_s
        waiting = False
        while True:
            with os.fdopen(open_lock(path), "rb") as file:
                if _takes_lock(file.fileno(), path):
                    try:
                        yield
                    finally:
                        path.unlink(missing_ok=True)
                    return
            if not waiting:
                say("waiting for another process that is preparing this model")
            waiting = True
            if time.monotonic() > end:
                raise ModelError(
                    f"another process has held {path} for {timeout_s:.0f} s: end that process, or raise "
                    "supervisor.prepare_timeout_s"
                )
            time.sleep(POLL_S)

    @contextmanager
    def _writable(self) -> Iterator[Path]:
        """A name of the root that stays its own."""
        try:
            make_folder(self.root)
            with OpenFolder(self.root) as opened, _names(opened, self.root):
                yield opened.path
        except OSError as error:
            ours = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.root)
            # Creating the root's parents fails with a parent's name.
            ours = ours or (error.filename is not None and self.root.is_relative_to(os.fsdecode(error.filename)))
            if not ours and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ModelError(
                f"cannot write the cache {self.root} ({error.strerror}): set cache_dir to a folder you can write to, "
                "with room for the model"
            ) from error


def _has_only_files(folder: Path) -> bool:
    """Whether a folder, which another user may have made, has nothing that is neither a file nor a folder: opening a
    FIFO would take for ever. Raises OSError."""
    modes = [path.stat().st_mode for path in folder.iterdir() if path.exists()]
    return all(stat.S_ISREG(mode) or stat.S_ISDIR(mode) for mode in modes)


def require_room(folder: Path, num_bytes: int) -> None:
    """Raises ModelError if less than `num_bytes` of disk space are free. `folder` may be an entry's open folder: its
    parent is none of the cache."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"preparing the model needs {num_bytes / 1024**2:.0f} MiB in {folder}, but only "
            f"{free / 1024**2:.0f} MiB are free: free disk space, or set cache_dir"
        )


def _takes_lock(fd: int, path: Path) -> bool:
    """Try to lock an open file. A process that held the lock before may have removed the file meanwhile: then others
    lock a new one, and this lock is worth nothing."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(path.stat(), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_entry(folder: Path, partial: Path) -> bool:
    """The caller holds the lock. Returns False if a server has it."""
    if is_held(folder):
        return False
    _remove(partial)
    if folder.exists():
        folder.rename(partial)  # an entry is complete or absent, also if this process is killed
        _remove(partial)
    return True


@contextmanager
def _names(opened: OpenFolder, name: Path) -> Iterator[None]:
    """Errors raised inside have an open folder's own name in them."""
    paths = re.compile("|".join(rf"{re.escape(str(one))}(?!\d)" for one in (opened.path, opened.path_of_children)))
    try:
        yield
    except ModelError as error:
        if (words := paths.sub(lambda _: str(name), str(error))) != str(error):
            raise type(error)(words) from error
        raise
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = paths.sub(lambda _: str(name), error.filename)
        raise


def _stamp(opened: OpenFolder, source: str) -> None:
    """Sync every file to disk, then write the stamp that lists them, and let others read the folder as far as the umask
    lets them read the stamp. execute may replace `PANELS` at any time."""
    files, folder = {}, opened.path
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(PANELS)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = path.stat().st_size
    with (folder / STAMP).open("xb") as file:
        file.write(msgspec.json.encode(Stamp(source, files)))
        file.flush()
        os.fsync(file.fileno())
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    os.fchmod(opened.fd, stat.S_IMODE(os.fstat(opened.fd).st_mode) | mode | (mode & 0o444) >> 2)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
