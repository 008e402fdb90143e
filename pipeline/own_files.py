"""Folders and locks that no other user of the machine chooses, where several users share a cache.

An open folder has a name in /proc that stays its own, whatever is renamed or linked above it meanwhile.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

PROC = Path("/proc")
WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOwn(PermissionError):
    """Other users can write to a folder; the message says what to do."""


class OpenFolder:
    """A folder of which `path` is a name as long as it is open. Without /proc that is its path."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError. A link is followed only if it is this user's or root's."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.folder = folder
        is_link = stat.S_ISLNK((info := folder.lstat()).st_mode)
        if is_link and not is_trusted(info):
            raise NotOwn(errno.EPERM, "this is a link of another user: remove it", str(folder))
        self.fd = os.open(folder, flags if is_link else flags | os.O_NOFOLLOW)
        # `self`: a child may use the name as its working directory before it runs another program.
        self.path = folder if descriptors(self.fd) is None else PROC / "self" / "fd" / str(self.fd)

    def close_to_others(self) -> None:
        """Take the right to write from others. Raises NotOwn if it is another user's."""
        info = os.fstat(self.fd)
        if not is_trusted(info):
            raise NotOwn(errno.EPERM, "this is another user's folder", str(self.folder))
        if info.st_mode & WRITE_OF_OTHERS:
            if info.st_uid == os.geteuid():
                os.fchmod(self.fd, stat.S_IMODE(info.st_mode) & ~WRITE_OF_OTHERS)
            if os.fstat(self.fd).st_mode & WRITE_OF_OTHERS:
                raise NotOwn(errno.EPERM, "other users can write to this folder", str(self.folder))

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_trusted(info: os.stat_result) -> bool:
    """Whether a file belongs to this user, or to root, who can read and write all files anyway."""
    return info.st_uid in (0, os.geteuid())


def is_closed(folder: Path) -> bool:
    """Whether only this user and root can write to a folder. One of this user is closed to others. Raises OSError."""
    try:
        with OpenFolder(folder) as opened:
            opened.close_to_others()
    except (PermissionError, FileNotFoundError):  # the latter for a link that leads nowhere
        return False
    return True


def own_folder(root: Path, name: str, default: Callable[[], Path], what: str, say: Callable[[str], None]) -> Path:
    """The folder `name` of the cache `root`, which is made. Where another user could write there, as in a cache that
    several users share, this user has one of its own beside it; or in the user's `default` cache, where others could
    replace that folder itself. `what` is kept in it. Raises OSError, NotOwn if that is not its own either."""
    root = _own_root(root, default, what, say)
    shared, own = root / name, root / f"{name}-{os.geteuid()}"
    for folder in (shared, own):
        with suppress(FileExistsError):  # perhaps made by another user, just now
            folder.mkdir(0o700)
        if is_closed(folder):
            return folder
        if folder == shared:
            say(f"other users can write to {shared}: keeping {what} in {own}")
    raise NotOwn(f"other users can write to {own}: remove it, or set cache_dir to a folder of your own")


def _own_root(root: Path, default_root: Callable[[], Path], what: str, say: Callable[[str], None]) -> Path:
    """The cache in which to keep `what`: `root`, unless other users may rename what is in it, or the user's default
    one. Makes it, closed to others whatever the umask. Raises OSError."""
    if not _is_open(_made(root)):
        return root
    default = _made(default_root())
    if root != default:
        say(f"other users can rename what is in {root}: keeping {what} in {default}")
    if _is_open(default) and default.stat().st_uid == os.geteuid():
        default.chmod(stat.S_IMODE(default.stat().st_mode) & ~WRITE_OF_OTHERS)  # as a umask of 002 left it
    if _is_open(default):
        raise NotOwn(f"other users can write to {default}: set cache_dir to a folder of your own")
    return default


def _made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o755)
    return folder


def _is_open(folder: Path) -> bool:
    """Whether other users may rename what is in a folder."""
    mode = folder.stat().st_mode
    return bool(mode & WRITE_OF_OTHERS) and not mode & stat.S_ISVTX


def open_lock(path: Path) -> int:
    """A descriptor of a file to lock, whose content stays as it is. Raises OSError: a link is not followed, and it must
    be a regular file of this user or root. Opening a FIFO does not block."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, 0o600)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or not is_trusted(info):
        os.close(fd)
        raise PermissionError(errno.EPERM, "this is not a regular file of this user: remove it", str(path))
    return fd


def descriptors(fd: int) -> Path | None:
    """The folder in which this process's descriptors have names; None where `fd` has none, as without /proc."""
    try:
        folder = PROC / (PROC / "self").readlink() / "fd"
        return folder if os.path.samestat((folder / str(fd)).stat(), os.fstat(fd)) else None
    except OSError:
        return None
