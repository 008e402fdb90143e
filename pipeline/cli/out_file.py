"""Output files of commands. They may be in folders in which other users write, such as /tmp.

A file is new, and gets its name when it is complete: what had the name before is replaced, not written to. Devices,
FIFOs and descriptors of this process are opened as they are. What another user may have planted is an error.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.config.load import ConfigError
from pipeline.own_files import NotOwn, descriptor, is_planted, open_parent
from pipeline.runtime.files.private_files import open_output, own_descriptor

PRIVATE = 0o600
"""The mode of files with prompts."""
READABLE = 0o666
"""The mode of other files, before the umask."""
NOT_NEW = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a folder in which this user can't create a file. It may have one that this user can write to."""
NAME_CHARS = 40
"""Characters of a file's name in the name of its incomplete one: bytes are limited to 255."""


def require_writable(path: Path, option: str) -> None:
    """Raise ConfigError if a file can't be written, before the command starts its work."""
    with writing(path, option):
        if own_descriptor(path) is not None:
            return
        with _target_of(path) as target:
            if target.info is not None and not target.is_regular:
                return  # opening a pipe or a device would have an effect on its reader
            fd, partial = target.open(READABLE)  # what is there keeps its content
            os.close(fd)
            if partial is not None:
                os.unlink(partial, dir_fd=target.folder)


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError if writing inside this context fails."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{option} {path}: can't be written: {reason}"]) from error


def write_output(path: Path, data: str | bytes, mode: int = READABLE) -> None:
    """Write a whole file. Raises OSError."""
    with output(path, mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def output(path: Path, mode: int = READABLE) -> Iterator[BinaryIO]:
    """A file to write, which has its name at the end of the context, if there is no exception. Raises OSError."""
    if own_descriptor(path) is not None:
        with os.fdopen(open_output(path), "wb") as file:
            yield file
        return
    with _target_of(path) as target:
        fd, partial = target.open(mode)
        try:
            with os.fdopen(fd, "wb") as file:
                if partial is None:
                    target.empty(fd, mode)
                yield file
            if partial is not None:
                target.complete(partial, mode)
                partial = None
        finally:
            if partial is not None:
                with suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=target.folder)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file of which nothing has the name yet. Raises OSError, FileExistsError if something has it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with descriptor(path.parent) as folder, os.fdopen(os.open(path.name, flags, mode, dir_fd=folder), "wb") as file:
        file.write(data)


class _Target:
    """A name in an open folder, and what has it. Raises NotOwn if another user may have planted that."""

    def __init__(self, folder: int, name: str, path: Path) -> None:
        self.folder = folder
        self.name = name
        self.info: os.stat_result | None = None
        with suppress(FileNotFoundError):
            self.info = os.lstat(name, dir_fd=folder)
        if self.info is None:
            return
        if stat.S_ISDIR(self.info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if is_planted(self.info, os.fstat(folder)):
            raise NotOwn(errno.EPERM, "there is a file of another user: remove it, or choose another name", str(path))

    @property
    def is_regular(self) -> bool:
        return self.info is not None and stat.S_ISREG(self.info.st_mode)

    def open(self, mode: int) -> tuple[int, str | None]:
        """A descriptor for writing, and the name of the new file; None if what is there is opened as it is, with its
        content."""
        if self.info is not None and not self.is_regular:
            return self._existing(), None
        if self.info is not None and not os.access(self.name, os.W_OK, dir_fd=self.folder, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.name)
        partial = f".{self.name[:NAME_CHARS]}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(partial, flags, mode, dir_fd=self.folder)
        except OSError as error:
            if self.info is None or error.errno not in NOT_NEW:
                raise
            return self._existing(), None
        if self.info is not None and self.info.st_uid == os.geteuid() and mode != PRIVATE:
            with suppress(PermissionError):  # a file system without modes
                os.fchmod(fd, stat.S_IMODE(self.info.st_mode) & 0o777)
        return fd, partial

    def empty(self, fd: int, mode: int) -> None:
        """Take the content of a regular file that is opened as it is, and the rights of others if it is to be
        private."""
        if self.is_regular:
            if mode == PRIVATE and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, PRIVATE)
            os.ftruncate(fd, 0)

    def complete(self, partial: str, mode: int) -> None:
        """Give a new file its name."""
        try:
            os.replace(partial, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except OSError as error:
            if error.errno != errno.EBUSY:  # a file that is mounted into a container by itself
                raise
            source = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.folder)
            with os.fdopen(source, "rb") as read, os.fdopen(self._existing(), "wb") as file:
                self.empty(file.fileno(), mode)
                shutil.copyfileobj(read, file)
            os.unlink(partial, dir_fd=self.folder)

    def _existing(self) -> int:
        """Waits for the reader of a FIFO. Raises OSError."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(self.name, flags, dir_fd=self.folder)
        if self.info is None or not os.path.samestat(self.info, os.fstat(fd)):
            os.close(fd)
            raise NotOwn(errno.EPERM, "it has been replaced meanwhile")
        return fd


@contextmanager
def _target_of(path: Path) -> Iterator[_Target]:
    with open_parent(path) as (folder, name):
        yield _Target(folder, name, path)
