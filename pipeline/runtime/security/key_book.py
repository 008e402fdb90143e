"""Where a server's keys come from: `[[keys]]` in the settings, gateway.api_keys_file, and PIPELINE_API_KEYS.

They can be read again while the server runs (`pipeline reload`). A key without a name is called key-1, key-2, … in the
order of the file, then of the variable. It keeps its name until the server ends, also if it is taken out and put back.
"""

import errno
import os
import re
import secrets
import select
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.config.load import ConfigError
from pipeline.config.settings import KeySettings
from pipeline.runtime.security.api_keys import (
    DIGEST_BYTES,
    FILE_KEY,
    MAX_FILE_BYTES,
    MAX_KEY_CHARS,
    MAX_KEYS,
    MAX_SLOTS,
    SERVER_VARIABLE,
    SHORT_CHARS,
    ApiKey,
    Keys,
    keyed,
    sha256,
    unnamed,
)

PIPE_S = 60.0
"""Time for the writer of a pipe to write the keys and close it."""
_KEY = re.compile(rf"[!-+\--~]{{1,{MAX_KEY_CHARS}}}")


class KeyBook:
    """Reads the keys. It remembers no key: digests with a secret of its own, and the name and slot of each."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(DIGEST_BYTES)
        self._unnamed: dict[bytes, str] = {}
        """Names of keys that were given none, by digest."""
        self._has_read = False
        self._slots: dict[str, int] = {}
        """By name; those of keys that are gone too."""
        self._of_environment: _Digests | None = None
        """Of the environment, which is read once; None if it has no such variable."""
        self._of_pipes: dict[str, _Digests] = {}
        """Of files that can be read once only, by path."""

    def take_environment(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigError."""
        if SERVER_VARIABLE in environ:
            self._of_environment = self._digests(listed(environ[SERVER_VARIABLE], SERVER_VARIABLE))

    def read(self, path: str, tables: Iterable[KeySettings] = ()) -> tuple[Keys | None, list[str]]:
        """The keys of `[[keys]]`, of a file (empty: none) and of the environment, and warnings. None if none of them is
        set. Raises ConfigError; its message never contains a key. Then nothing has changed."""
        warnings: list[str] = []
        found: dict[bytes, ApiKey] = {}
        sources: list[_Digests] = []
        slots = dict(self._slots)
        for index, one in enumerate(tables):
            key = ApiKey(one.name, slots.setdefault(one.name, len(slots)), one.rpm, one.tpm, one.models)
            digests = [keyed(self._secret, bytes.fromhex(one.digest.removeprefix("sha256:")))] if one.digest else []
            if one.file:
                sources.append(self._read_file(one.file, f"keys[{index}].file", warnings))
                digests += sources[-1].digests
            for digest in digests:
                if (other := found.setdefault(digest, key)).name != one.name:
                    raise ConfigError([f"keys[{index}]: {one.name!r} has the same key as {other.name!r}"])
        plain = [self._read_file(path, FILE_KEY, warnings)] if path else []
        plain += [self._of_environment] if self._of_environment is not None else []
        sources += plain
        names = dict(self._unnamed)
        for digest in (digest for source in plain for digest in source.digests):
            if digest not in found:
                name = names.setdefault(digest, unnamed(len(names)))
                found[digest] = ApiKey(name, slots.setdefault(name, len(slots)))
        if not found:
            return None, []
        if len(found) > MAX_KEYS:
            where = FILE_KEY if path else "keys"
            raise ConfigError([f"{where}: there are {len(found)} keys; the limit is {MAX_KEYS}"])
        if len(slots) > MAX_SLOTS:
            raise ConfigError(
                [f"keys: {len(slots)} names since the start; the limit is {MAX_SLOTS}: restart the server"]
            )
        if num_short := sum(source.num_short for source in sources):
            warnings.append(
                f"{num_short} of {len(found)} API keys are shorter than {SHORT_CHARS} characters and can be guessed; "
                "`openssl rand -hex 32` generates a better one"
            )
        self._unnamed, self._slots, self._has_read = names, slots, True
        return Keys(self._secret, found, found.values()), warnings

    def _read_file(self, path: str, setting: str, warnings: list[str]) -> "_Digests":
        """Those of a file that `setting` names. Raises ConfigError."""
        if path in self._of_pipes:
            return self._of_pipes[path]
        keys, is_regular = _of_file(Path(path), setting, warnings, may_wait=not self._has_read)
        found = self._digests(keys)
        if not is_regular:
            self._of_pipes[path] = found
        return found

    def _digests(self, keys: list[str]) -> "_Digests":
        digests = [keyed(self._secret, sha256(key)) for key in dict.fromkeys(keys)]
        return _Digests(digests, sum(len(key) < SHORT_CHARS for key in keys))


class _Digests(NamedTuple):
    """The keys of one source."""

    digests: list[bytes]
    num_short: int


def read(path: str, environ: Mapping[str, str], tables: Iterable[KeySettings] = ()) -> tuple[Keys | None, list[str]]:
    """A server's keys, which are read once, and warnings; as `KeyBook.read`."""
    book = KeyBook()
    book.take_environment(environ)
    return book.read(path, tables)


def listed(text: str, origin: str) -> list[str]:
    """The keys in a text that separates them by commas or line breaks. `origin` is the name of what the user has set.
    Raises ConfigError; its message never contains a key."""
    return _of_lines(re.split(r"[,\n]", text), origin, "entry")


def _of_file(path: Path, setting: str, warnings: list[str], *, may_wait: bool) -> tuple[list[str], bool]:
    """The keys in a file, and whether it is a regular one. With `may_wait` it may be a pipe."""
    try:
        with open(path, "rb", buffering=0, opener=_open) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = _all_of(file.fileno(), time.monotonic() + PIPE_S if may_wait else 0.0)
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ConfigError([f"{setting}: {path} can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{setting}: {path} is not text (byte {error.start})"]) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{setting}: {path} is larger than {MAX_FILE_BYTES} bytes"])
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.append(f"{setting}: {path} can be read by other users; restrict it with chmod 600")
    lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
    return _of_lines(lines, f"{setting}: {path}", "line"), stat.S_ISREG(mode)


def _all_of(fd: int, deadline_s: float) -> bytes:
    """The bytes of an open file: at most one more than a file of keys may have. Those of a pipe are waited for, until
    the deadline by time.monotonic(). Raises OSError if its writer has not closed it by then."""
    data, waiting = bytearray(), select.poll()
    waiting.register(fd, select.POLLIN)
    while len(data) <= MAX_FILE_BYTES:
        if deadline_s and not waiting.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
            raise OSError(errno.ETIMEDOUT, f"the writer of this pipe has not closed it within {PIPE_S:g} s")
        try:
            part = os.read(fd, MAX_FILE_BYTES + 1 - len(data))
        except BlockingIOError:  # a pipe that is not waited for
            break
        if not part:
            break
        data += part
    return bytes(data)


def _of_lines(lines: list[str], origin: str, unit: str) -> list[str]:
    keys = []
    for number, line in enumerate(lines, 1):
        if not (key := line.strip()):
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(
                [
                    f"{origin}, {unit} {number}: a key must have 1 to {MAX_KEY_CHARS} visible ASCII characters, "
                    "without spaces and commas"
                ]
            )
        keys.append(key)
    if not keys:  # an empty file or variable must not disable authentication
        raise ConfigError([f"{origin}: contains no key"])
    return keys


def _open(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
