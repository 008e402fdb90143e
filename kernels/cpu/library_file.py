"""Loads compiled libraries: what is checked is what is loaded.

Loading a library runs its code. So its owner, mode and content are those of an open file, and dlopen gets a name of
that descriptor: renaming the file, or a folder above it, puts no other one in its place in between.

dlopen takes two libraries of one name for one. Descriptors of loaded libraries stay open, so that their numbers, and
these names, are not used again. The names begin with the process's id, not with `self`, so that a debugger can open
them. `perf` and /proc/PID/maps show the file's own path, as the kernel knows it.
"""

import ctypes
import hashlib
import logging
import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from pipeline import own_files

SEAL_BYTES = 32


class Loaded(NamedTuple):
    """A library of this process: what dlopen returned, and the open file."""

    handle: int
    fd: int


_lock = threading.Lock()
_loaded: dict[tuple[int, int], Loaded] = {}
"""By device and inode."""
_names: set[str] = set()
"""All names that dlopen has seen."""


def seal(library: Path) -> None:
    """Append a file's digest to it, and sync it to disk."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> ctypes.CDLL:
    """The sealed library at `path`, which stays loaded. All that loads one from a cache calls this.

    Raises OSError if it is missing, another user's or open to others, incomplete, or can't be loaded.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return load_open(fd, path)
    finally:
        os.close(fd)


def load_open(fd: int, path: Path) -> ctypes.CDLL:
    """The same of an open file, which errors call `path`."""
    info = os.fstat(fd)
    _check(fd, info, path)
    with _lock:
        loaded = _loaded.get((info.st_dev, info.st_ino))
        if loaded is None:
            own = os.dup(fd)
            try:
                loaded = Loaded(_dlopen(own, path), own)
            except OSError:
                os.close(own)
                raise
            _loaded[info.st_dev, info.st_ino] = loaded
    return ctypes.CDLL(str(path), handle=loaded.handle)


def content(library: ctypes.CDLL) -> bytes:
    """The bytes of the file of a loaded library, with its seal. Raises OSError if they can't be read."""
    (fd,) = [one.fd for one in _loaded.values() if one.handle == library._handle]
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _check(fd: int, info: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path} is not a regular file")
    if not own_files.is_trusted(info) or info.st_mode & own_files.WRITE_OF_OTHERS:
        raise OSError(f"other users can write to {path}")
    data = os.pread(fd, info.st_size, 0)
    # Loading a truncated file would kill the process instead of failing.
    if hashlib.sha256(data[:-SEAL_BYTES]).digest() != data[-SEAL_BYTES:]:
        raise OSError(f"{path} is incomplete")


def _dlopen(fd: int, path: Path) -> int:
    """The handle of an open library. Raises OSError."""
    folder = own_files.descriptors(fd)
    if folder is None:
        logging.getLogger("pipeline").warning(
            "%s can't be used: loading %s by its path. If other users may rename a folder above it, they could put a "
            "library of theirs in its place while it is loaded; mount /proc, or set cache_dir to a folder of your own",
            own_files.PROC / "self/fd",
            path,
        )
    name = _unused_name(path.parent, path.name) if folder is None else _unused_name(folder, str(fd))
    try:
        handle = ctypes.CDLL(name)._handle
    except OSError as error:
        raise OSError(str(error).replace(name, str(path))) from error
    _names.add(name)
    return handle


def _unused_name(folder: Path, name: str) -> str:
    """A name of a file that no library has had, even if others have closed its descriptor and its number came back."""
    prefix = f"{folder}/"
    while prefix + name in _names:
        prefix += "./"
    return prefix + name
