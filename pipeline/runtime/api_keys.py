"""API keys: where a server has them from, and how one that a client shows is compared with them.

A key is never kept: the supervisor reads the keys, makes of each a digest under a secret that this start of the server
drew, and hands both to the gateways on a descriptor. So there is no key in the settings, in what a stage is told at its
start, in a recording, a command line or the environment of a stage, and a digest that leaked is worth nothing after
the next start.

    file, PIPELINE_API_KEYS ──read──► Keys ──memfd──► gateway ──admits(shown)──► in, or 401
"""

import hashlib
import hmac
import os
import re
import resource
import secrets
import stat
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from pipeline.config.load import ConfigError

SERVER_VARIABLE = "PIPELINE_API_KEYS"
"""Of a server's environment: its keys, with commas or line ends between."""
CLIENT_VARIABLE = "PIPELINE_API_KEY"
"""Of a client's environment: the key that it shows where it is given none."""
FILE_KEY = "gateway.api_keys_file"

MAX_KEYS = 1024
"""A request is compared with all of them."""
MAX_KEY_CHARS = 512
SHORT_CHARS = 16
"""Keys shorter than this can be guessed, sooner or later."""
MAX_FILE_BYTES = 1024**2
DIGEST_BYTES = 32
SCOPE_BYTES = 32
NO_SCOPE = ""
"""Of requests that come without an API key."""

_KEY = re.compile(rf"[!-+\--~]{{1,{MAX_KEY_CHARS}}}")
_BEARER = re.compile(rf"bearer +([!-~]{{1,{MAX_KEY_CHARS}}})", re.IGNORECASE | re.ASCII)


class Keys:
    """Digests of the keys that a server takes."""

    def __init__(self, secret: bytes, digests: Iterable[bytes]) -> None:
        self._secret = secret
        self._digests = tuple(digests)

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Keys":
        secret = secrets.token_bytes(DIGEST_BYTES)
        return cls(secret, (_digest(secret, key) for key in dict.fromkeys(keys)))

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"Keys(<{len(self)}>)"

    def admits(self, shown: str | None) -> bool:
        """Whether a client's key is one of these."""
        return self.scope_of(shown) is not None

    def scope_of(self, shown: str | None) -> str | None:
        """The scope of a client's key: a name for the key that all gateways of this start agree on and that nobody can
        compute who does not have the secret. None if the key is not one of these.

        Takes as long for any key of a length, right or wrong: digests are compared, in constant time, and always with
        all of them."""
        digest = _digest(self._secret, shown or "")
        found = False
        for one in self._digests:
            found |= hmac.compare_digest(one, digest)
        scope = hashlib.blake2b(digest, key=self._secret, digest_size=SCOPE_BYTES, person=b"pipeline scope").hexdigest()
        return scope if found and shown else None

    def share(self) -> int:
        """A descriptor, the caller's, from which `inherited` makes the same again."""
        fd = os.memfd_create("pipeline-keys")
        os.write(fd, self._secret + b"".join(self._digests))
        return fd

    @classmethod
    def inherited(cls, fd: int) -> "Keys":
        """What `share` wrote. The descriptor stays the caller's, and may be read again."""
        data = os.pread(fd, DIGEST_BYTES * (MAX_KEYS + 1), 0)
        if len(data) < 2 * DIGEST_BYTES or len(data) % DIGEST_BYTES:
            raise ValueError(f"{len(data)} bytes are not valid keys")  # never: better no server than one that is open
        starts = range(DIGEST_BYTES, len(data), DIGEST_BYTES)
        return cls(data[:DIGEST_BYTES], (data[start : start + DIGEST_BYTES] for start in starts))


def bearer(headers: list[str]) -> str | None:
    """The key in a request's Authorization headers; None where there is none, or more than one."""
    match = _BEARER.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    return match[1] if match else None


def of_client(given: str | None) -> str | None:
    """The key that a client shows: the one that it was given, or that of its environment."""
    return given if given is not None else os.environ.get(CLIENT_VARIABLE) or None


def read(path: str, environ: Mapping[str, str]) -> tuple[Keys | None, list[str]]:
    """The keys of a server, from its file (empty: it has none) and its environment, and what is to be warned of. None
    where neither is given. Raises ConfigError, in words that never hold a key."""
    keys: list[str] = []
    warnings: list[str] = []
    if path:
        keys += _of_file(Path(path), warnings)
    if SERVER_VARIABLE in environ:
        keys += _of_lines(re.split(r"[,\n]", environ[SERVER_VARIABLE]), SERVER_VARIABLE, "entry")
    if not path and SERVER_VARIABLE not in environ:
        return None, []
    if len(keys) > MAX_KEYS:
        raise ConfigError([f"{FILE_KEY}: there are {len(keys)} keys, and at most {MAX_KEYS} are taken"])
    if short := sum(len(key) < SHORT_CHARS for key in keys):
        warnings.append(
            f"{short} of {len(keys)} API keys are shorter than {SHORT_CHARS} characters, and can be guessed: "
            "`openssl rand -hex 32` makes a better one"
        )
    return Keys.of(keys), warnings


def keep_out_of_core_dumps() -> None:
    """Have this process and those that it starts leave no core dump: it would hold keys.

    A limit of 0 does not hold for a `core_pattern` that pipes the dump to a program. The kernel takes 1 for "no dump
    there either", and a file of 1 byte is not written (fs/coredump.c). What is dumped all the same, because the limit
    was 0 for good or was raised, is without memory.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))
    with suppress(OSError):  # a kernel without it
        Path("/proc/self/coredump_filter").write_text("0")


def forget(environ: MutableMapping[str, str]) -> None:
    """Take the keys out of an environment, so that no process started from here on has them."""
    for name in (SERVER_VARIABLE, CLIENT_VARIABLE):
        environ.pop(name, None)


def _of_file(path: Path, warnings: list[str]) -> list[str]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ConfigError([f"{FILE_KEY}: {path} can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{FILE_KEY}: {path} is not text (byte {error.start})"]) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{FILE_KEY}: {path} is larger than {MAX_FILE_BYTES} bytes"])
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.append(f"{FILE_KEY}: {path} can be read by other users; chmod 600 keeps it to its owner")
    lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
    return _of_lines(lines, f"{FILE_KEY}: {path}", "line")


def _of_lines(lines: list[str], origin: str, place: str) -> list[str]:
    keys = []
    for number, line in enumerate(lines, 1):
        if not (key := line.strip()):
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(
                [
                    f"{origin}, {place} {number}: a key has 1 to {MAX_KEY_CHARS} visible ASCII characters, "
                    "without spaces and commas"
                ]
            )
        keys.append(key)
    if not keys:  # an empty secret must not open the server
        raise ConfigError([f"{origin}: holds no key"])
    return keys


def scoped_salt(scope: str, salt: str) -> str:
    """The salt of a request's prefix-cache blocks: its own `cache_salt` within its key's scope. Whatever a client gives
    as its own, it stays in its scope: scope and salt are separate inputs, and the scope is secret. Without a scope the
    client's own, unchanged."""
    if scope == NO_SCOPE:
        return salt
    return hmac.digest(bytes.fromhex(scope), b"prefix cache\0" + salt.encode("utf-8", "surrogatepass"), "sha256").hex()


def _digest(secret: bytes, key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=secret, digest_size=DIGEST_BYTES).digest()
