"""The user's cache: folders that are there completely or not at all.

    absent ──lock──► .partial-<key> ──fill──► stamped ──rename──► <key> ──a file lost──► absent
            one process            it alone           at once             found by its size

An entry is complete when its stamp names every file with its size, and the files are that size. The stamp is written
last and the folder renamed after it, so a kill at any moment leaves a `.partial-` folder that the next process,
holding the entry's lock, throws away. Locks are the kernel's (flock) and end with their process.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.config.settings import Settings
from pipeline.stages.prepare.sources.source import ModelError, expanded

STAMP = "complete.json"
POLL_S = 0.05


class Stamp(msgspec.Struct, frozen=True):
    """What makes an entry complete."""

    source: str
    """Where it came from, for people who look into the cache."""
    files: dict[str, int]
    """Sizes in bytes by relative path."""


class Cache:
    """Entries under one root. Raises ModelError where the root can't be written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, settings: Settings) -> "Cache":
        if settings.cache_dir:
            return cls(expanded(settings.cache_dir, "cache_dir").absolute())
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(expanded(base, "cache_dir").absolute() / "pipeline")

    def lookup(self, key: str) -> Path | None:
        """The folder of a complete entry, or None."""
        folder = self.root / key
        try:
            stamp = msgspec.json.decode((folder / STAMP).read_bytes(), type=Stamp)
            complete = all((folder / name).stat().st_size == size for name, size in stamp.files.items())
        except (OSError, ValueError):  # whatever is wrong with a stamp, the entry is made again
            return None
        return folder if complete else None

    def ensure(
        self, key: str, source: str, fill: Callable[[Path], None], say: Callable[[str], None], timeout_s: float
    ) -> Path:
        """The folder of the entry `key`; where it isn't complete, `fill` makes it in an empty folder it is given.

        Of several processes one fills and the others wait for it, at most `timeout_s`; `say` tells the user so.
        """
        if (found := self.lookup(key)) is not None:
            return found
        with self._writable(), self._lock(key, say, timeout_s):
            if (found := self.lookup(key)) is not None:
                return found
            partial = self.root / f".partial-{key}"
            _remove(partial)
            partial.mkdir()
            try:
                fill(partial)
                _stamp(partial, source)
                _remove(self.root / key)
                partial.rename(self.root / key)
            finally:
                _remove(partial)
        return self.root / key

    @contextmanager
    def _lock(self, key: str, say: Callable[[str], None], timeout_s: float) -> Iterator[None]:
        path = self.root / f".lock-{key}"
        end = time.monotonic() + timeout_s
        waiting = False
        with path.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        say("another process is preparing this model: waiting for it")
                    waiting = True
                    if time.monotonic() > end:
                        raise ModelError(
                            f"another process has held {path} for {timeout_s:.0f} s: end it, or raise "
                            "supervisor.prepare_timeout_s"
                        ) from None
                time.sleep(POLL_S)
            yield

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            ours = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.root)
            if not ours and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ModelError(
                f"cannot write the cache {self.root} ({error.strerror}): set cache_dir to a folder you can write to, "
                "with room for the model"
            ) from error


def require_room(folder: Path, num_bytes: int) -> None:
    """Raises ModelError where the disk can't take `num_bytes` more."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"preparing the model needs {num_bytes / 1024**2:.0f} MiB in {folder.parent}, where "
            f"{free / 1024**2:.0f} MiB are free: make room, or set cache_dir"
        )


def _stamp(folder: Path, source: str) -> None:
    """Put every file on the disk, then write the stamp that names them."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = path.stat().st_size
    with (folder / STAMP).open("wb") as file:
        file.write(msgspec.json.encode(Stamp(source, files)))
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Make room for a folder, whatever stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
