"""The file of replies. A line is written at once and never again, so a run that was killed leaves whole lines, and
perhaps one that it had begun, which the next run removes."""

import fcntl
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.cli.out_file import PRIVATE
from pipeline.errors import UserError
from pipeline.own_files import open_to_append


class Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Raw


class Reply(msgspec.Struct):
    """One line, in OpenAI's form."""

    id: str
    custom_id: str
    response: Response
    error: dict[str, Any] | None = None


class _Known(msgspec.Struct):
    """What is read of a reply."""

    custom_id: str
    error: Any = None


_decoder = msgspec.json.Decoder(_Known)


class ReplyFile:
    """Use as a context manager."""

    def __init__(self, path: Path, custom_ids: Collection[str], *, overwrite: bool) -> None:
        """Open the file, which may have the replies to some of these requests. Raises UserError if it has others."""
        self.path = path
        self.num_errors = 0
        """Replies that are errors."""
        try:
            if path.exists() and not path.is_file():  # a device or a pipe, which opening may change
                raise UserError(f"--output-file {path}: needs a file, which a later run reads again")
            self._fd = open_to_append(path)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._lock()
            if overwrite:
                os.ftruncate(self._fd, 0)
            if not os.fstat(self._fd).st_size:
                os.fchmod(self._fd, PRIVATE)
            self.done = self._read(custom_ids)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise self._unwritable(error) from error
            raise

    def _lock(self) -> None:
        """Two runs at once would ask for each line twice. The kernel unlocks the file of a run that was killed."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output-file {self.path}: another run-batch writes it: wait for its end") from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"--output-file {self.path}: can't be written: {error.strerror}")

    def _read(self, custom_ids: Collection[str]) -> set[str]:
        """The requests that have a reply. Removes what is behind the last whole line."""
        done: set[str] = set()
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    known = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raise self._other(f"line {number} is no reply") from None
                if known.custom_id not in custom_ids:
                    raise self._other(
                        f"line {number} is the reply to {known.custom_id!r}, which the input does not have"
                    )
                self.num_errors += known.error is not None
                done.add(known.custom_id)
        os.ftruncate(self._fd, end)
        return done

    def _other(self, why: str) -> UserError:
        return UserError(
            f"--output-file {self.path} belongs to another input: {why}; choose another file, or --overwrite"
        )

    def write(self, reply: Reply) -> None:
        """Raises OSError."""
        data = memoryview(msgspec.json.encode(reply) + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]
        self.done.add(reply.custom_id)
        self.num_errors += reply.error is not None

    def __enter__(self) -> "ReplyFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
