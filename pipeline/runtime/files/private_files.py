"""Creates files that hold what clients have sent, such as recordings: only this user may read them, and no other user
of the machine chooses where they are."""

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from pipeline import own_files
from pipeline.own_files import descriptor

MAX_LINKS = 8


def open_output(path: str | Path) -> int:
    """As `create_private`, blocking, for the output that the user of a command names: opening a FIFO waits for its
    reader, and a path that leads to a descriptor of this process, such as /dev/stdout, gives that descriptor's copy. A
    stage must not use it: its descriptors are not its clients' to write to."""
    number = own_descriptor(path)
    if number is not None:
        fd = os.dup(number)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            os.close(fd)
            raise OSError(errno.EBADF, "this descriptor is not open for writing")
        return fd
    fd = create_private(path, fifo_flags=0)
    os.set_blocking(fd, True)
    return fd


def create_private(path: str | Path, fifo_flags: int = os.O_NONBLOCK) -> int:
    """A descriptor for writing to a new file with mode 0600, non-blocking. A regular file of this user with this name
    is replaced. A device or FIFO, of this user or of root, is opened as it is. Raises OSError otherwise: a link is not
    followed to a file, and a file of another user, who could read it, is not opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    parent, name = os.path.split(path)
    with descriptor(parent or ".") as folder:
        return _create(folder, name, flags, fifo_flags)


def _create(folder: int, name: str, flags: int, fifo_flags: int) -> int:
    try:
        return os.open(name or ".", flags, 0o600, dir_fd=folder)
    except FileExistsError:
        info = os.lstat(name or ".", dir_fd=folder)
    if not own_files.is_trusted(info):
        raise PermissionError(errno.EPERM, "there is a file of another user")
    if stat.S_ISREG(info.st_mode):
        os.unlink(name, dir_fd=folder)
        return os.open(name, flags, 0o600, dir_fd=folder)
    how = fifo_flags | os.O_NOFOLLOW if stat.S_ISFIFO(info.st_mode) else os.O_NONBLOCK
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | how, dir_fd=folder)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) or not own_files.is_trusted(info):
        os.close(fd)
        raise OSError(errno.ELOOP, "this is a link, or has been replaced: name the file itself")
    return fd


def own_descriptor(path: str | Path) -> int | None:
    """The number of this process's descriptor to which a path leads, over links of this user and root only."""
    target, own = os.fspath(path), Path(f"/proc/{os.getpid()}/fd")
    for _ in range(MAX_LINKS):
        try:
            if not own_files.is_trusted(os.lstat(target)):
                return None
            folder, name = Path(target).parent, Path(target).name
            if name.isdecimal() and folder.resolve() == own:
                return int(name)
            target = str(folder / Path(target).readlink())
        except OSError:
            return None
    return None


def nameless_file(folder: Path) -> int:
    """A descriptor for reading and writing a new file with mode 0600 that has no name: it is gone when the last
    descriptor is closed. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # this file system, or an old kernel, has none
            raise
    fd, path = tempfile.mkstemp(dir=folder)
    Path(path).unlink()
    return fd
