"""Folders and locks that no other user of the machine chooses, where several users share a cache.

An open folder has a name in /proc that stays its own, whatever is renamed or linked above it meanwhile.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

PROC = Path("/proc")
WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40
"""Links that a path may have, as in the kernel."""
OPEN = re.compile(r"/proc/self/fd/(\d+)(?=/|$)")
"""The name of an open folder."""


class NotOwn(PermissionError):
    """Other users can write to a folder; the message says what to do."""


class OpenFolder:
    """A folder of which `path` is a name as long as it is open. Without /proc that is its path."""

    def __init__(self, folder: Path, *, links: bool = True) -> None:
        """Raises OSError. The folder itself may be a link of this user's or root's if there are `links`; one above it
        may not be a link that another user has planted."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.folder = folder
        with descriptor(folder.parent) as parent:
            is_link = stat.S_ISLNK((info := os.lstat(folder.name or ".", dir_fd=parent)).st_mode)
            if is_link and not (links and is_trusted(info)):
                raise NotOwn(errno.EPERM, "this is a link of another user: remove it", str(folder))
            if not is_link:
                self.fd = os.open(folder.name or ".", flags | os.O_NOFOLLOW, dir_fd=parent)
        if is_link:
            with descriptor(folder) as target:
                self.fd = os.open(".", flags, dir_fd=target)
        named = descriptors(self.fd)
        # `self`: a child may use the name as its working directory before it runs another program.
        self.path = folder if named is None else PROC / "self" / "fd" / str(self.fd)
        self.path_of_children = folder if named is None else named / str(self.fd)
        """Its name in this process and in children of the same user."""

    @classmethod
    def new(cls, folder: Path) -> Self:
        """A new folder that only this user can enter. Raises OSError, also if another user replaces it at once."""
        folder.mkdir(0o700)
        opened = cls(folder, links=False)
        try:
            info = os.fstat(opened.fd)
            if info.st_uid != os.geteuid() or info.st_mode & 0o077 or os.listdir(opened.fd):  # noqa: PTH208
                raise NotOwn(errno.EPERM, "another user has replaced this folder", str(folder))
        except BaseException:
            opened.close()
            raise
        return opened

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


def is_planted(info: os.stat_result, folder: os.stat_result) -> bool:
    """Whether another user may have put a file or a link into a folder for this user to find. The owner of a folder to
    which no one else can write chooses what is in it: who names it, trusts its owner."""
    return not is_trusted(info) and (info.st_uid != folder.st_uid or bool(folder.st_mode & WRITE_OF_OTHERS))


@contextmanager
def descriptor(folder: str | Path, start: int | None = None, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder, to which no link leads that another user has planted. It opens one name after the
    other, so nothing can be swapped in between. A relative path begins at the descriptor `start`. What is missing is
    made if `make` is set. Raises OSError."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # without the right to list it
    text = os.fspath(folder)
    if opened := OPEN.match(text):
        text, fd = text[opened.end() :].lstrip("/"), os.dup(int(opened[1]))
    else:
        fd = os.open("/" if text.startswith("/") else ".", flags, dir_fd=start)
    try:
        left, num_links = text.split("/")[::-1], 0
        while left:
            if (name := left.pop()) in ("", "."):
                continue
            try:
                following = _opened(name, flags | os.O_NOFOLLOW, fd, make)
            except NotADirectoryError:
                target = link_at(fd, name, text)
                if target is None:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
                if (num_links := num_links + 1) > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder)) from None
                left += target.split("/")[::-1]
                following = os.open("/" if target.startswith("/") else ".", flags, dir_fd=fd)
            except OSError as error:
                error.filename = str(folder)
                raise
            os.close(fd)
            fd = following
        yield fd
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """As mkdir -p, but not where a link leads that another user has planted. Raises OSError."""
    with descriptor(folder, make=True):
        pass


def _opened(name: str, flags: int, parent: int, make: bool) -> int:
    if make:
        with suppress(FileNotFoundError):
            return os.open(name, flags, dir_fd=parent)
        with suppress(FileExistsError):  # of another process, just now
            os.mkdir(name, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def link_at(folder: int, name: str, path: str | Path) -> str | None:
    """Where a link in an open folder leads; None if it isn't one. Raises OSError, NotOwn with `path` if another user
    has planted it."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        info = os.fstat(fd)
        if not stat.S_ISLNK(info.st_mode):
            return None
        if is_planted(info, os.fstat(folder)):
            raise NotOwn(errno.EPERM, f"{name} is a link of another user: name the file or folder itself", str(path))
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


@contextmanager
def open_parent(path: str | Path) -> Iterator[tuple[int, str]]:
    """The descriptor of the folder, and the name in it, to which a file's path leads, over links that no other user has
    planted. There may be no such file. Raises OSError."""
    target, above = os.fspath(path), None
    try:
        for _ in range(MAX_LINKS):
            parent, name = os.path.split(target)
            with descriptor(parent or ".", above) as folder:
                last, above = above, os.dup(folder)
            if last is not None:
                os.close(last)
            leads_to = None
            with suppress(FileNotFoundError):
                leads_to = link_at(above, name or ".", path)
            if leads_to is None:
                yield above, name or "."
                return
            target = leads_to
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    finally:
        if above is not None:
            os.close(above)


def open_to_append(path: Path) -> int:
    """A descriptor of a file, new or not, to which this process appends. Raises OSError, NotOwn if another user may
    have planted it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    with open_parent(path) as (folder, name):
        fd = os.open(name, flags, 0o666, dir_fd=folder)
        if is_planted(os.fstat(fd), os.fstat(folder)):
            os.close(fd)
            raise NotOwn(errno.EPERM, "there is a file of another user", str(path))
        return fd


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
    with descriptor(folder.parent, make=True) as parent, suppress(FileExistsError):
        os.mkdir(folder.name, 0o755, dir_fd=parent)
    return folder


def _is_open(folder: Path) -> bool:
    """Whether other users may rename what is in a folder."""
    mode = folder.stat().st_mode
    return bool(mode & WRITE_OF_OTHERS) and not mode & stat.S_ISVTX


def open_lock(path: Path) -> int:
    """A descriptor of a file to lock, as `open_own`."""
    return open_own(path, 0o600)


def open_own(path: Path, mode: int = 0o666) -> int:
    """A descriptor of a file, new or not, to read and to write, whose content stays as it is. Raises OSError: a link is
    not followed, and it must be a regular file of this user or root. Opening a FIFO does not block."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, mode)
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
