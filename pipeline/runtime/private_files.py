"""Creates files that hold what clients have sent, such as recordings: only this user may read them, and no other user
of the machine chooses where they are."""

import errno
import os
import stat
from pathlib import Path


def create_private(path: str | Path) -> int:
    """A descriptor for writing to a new file with mode 0600, non-blocking. A regular file of this user with this name
    is replaced. A device or FIFO, of this user or of root, is opened as it is. Raises OSError otherwise: a link is not
    followed to a file, and a file of another user, who could read it, is not opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        info = os.lstat(path)
    if info.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "there is a file of another user")
    if stat.S_ISREG(info.st_mode):
        Path(path).unlink()
        return os.open(path, flags, 0o600)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
        os.close(fd)
        raise OSError(errno.ELOOP, "this is a link, or has been replaced: name the file itself")
    return fd
