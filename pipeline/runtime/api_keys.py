"""API keys: how a server reads them, and how it checks a client's key.

No key is stored. The supervisor reads the keys, computes a digest of each with a secret drawn at this start, and passes
the digests and the secret to the gateways in a memfd. So no key is in the settings, a stage's `Launch`, a recording, a
command line or a stage's environment, and a leaked digest is worthless after the next start.

    file, PIPELINE_API_KEYS ──read──► Keys ──memfd──► gateway ──admits(key)──► accepted, or 401
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
"""A server's environment variable: its keys, separated by commas or line breaks."""
CLIENT_VARIABLE = "PIPELINE_API_KEY"
"""A client's environment variable: the default key."""
FILE_KEY = "gateway.api_keys_file"

MAX_KEYS = 1024
"""Bounded, because each request's key is compared with all keys."""
MAX_KEY_CHARS = 512
SHORT_CHARS = 16
"""Shorter keys can be guessed."""
MAX_FILE_BYTES = 1024**2
DIGEST_BYTES = 32
SCOPE_BYTES = 32
NO_SCOPE = ""
"""The scope of requests without an API key."""

_KEY = re.compile(rf"[!-+\--~]{{1,{MAX_KEY_CHARS}}}")
_BEARER = re.compile(rf"bearer +([!-~]{{1,{MAX_KEY_CHARS}}})", re.IGNORECASE | re.ASCII)


class Keys:
    """Digests of the keys that a server accepts."""

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

    def admits(self, key: str | None) -> bool:
        """Whether a client's key is one of these."""
        return self.scope_of(key) is not None

    def scope_of(self, key: str | None) -> str | None:
        """The scope of a client's key: an id that is the same in all gateways of this start and that can't be computed
        without the secret. None if the key is not one of these.

        The time depends only on the length of `key`: the digest is compared in constant time, and with all keys."""
        digest = _digest(self._secret, key or "")
        found = False
        for one in self._digests:
            found |= hmac.compare_digest(one, digest)
        scope = hashlib.blake2b(digest, key=self._secret, digest_size=SCOPE_BYTES, person=b"pipeline scope").hexdigest()
        return scope if found and key else None

    def packed(self) -> bytes:
        """The secret and the digests, for `unpacked` in another process. No key can be read from them, but short keys
        can be guessed by them."""
        return self._secret + b"".join(self._digests)

    @classmethod
    def unpacked(cls, data: bytes) -> "Keys":
        """The keys of `packed`. Raises ValueError."""
        if len(data) < 2 * DIGEST_BYTES or len(data) % DIGEST_BYTES:
            raise ValueError(f"{len(data)} bytes are not valid keys")
        starts = range(DIGEST_BYTES, len(data), DIGEST_BYTES)
        return cls(data[:DIGEST_BYTES], (data[start : start + DIGEST_BYTES] for start in starts))

    def share(self) -> int:
        """Write the digests to a memfd for `inherited`. The caller owns the descriptor."""
        fd = os.memfd_create("pipeline-keys")
        os.write(fd, self.packed())
        return fd

    @classmethod
    def inherited(cls, fd: int) -> "Keys":
        """The keys that `share` wrote. The descriptor stays open and may be read again."""
        return cls.unpacked(os.pread(fd, DIGEST_BYTES * (MAX_KEYS + 1), 0))


def bearer(headers: list[str]) -> str | None:
    """The key in a request's Authorization headers; None unless there is exactly one."""
    match = _BEARER.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    return match[1] if match else None


def of_client(given: str | None) -> str | None:
    """The key that a client sends: `given`, or the one in its environment."""
    return given if given is not None else os.environ.get(CLIENT_VARIABLE) or None


def read(path: str, environ: Mapping[str, str]) -> tuple[Keys | None, list[str]]:
    """A server's keys, from its file (empty: no file) and its environment, and warnings. The keys are None if neither
    is set. Raises ConfigError; its message never contains a key."""
    keys: list[str] = []
    warnings: list[str] = []
    if path:
        keys += _of_file(Path(path), warnings)
    if SERVER_VARIABLE in environ:
        keys += listed(environ[SERVER_VARIABLE], SERVER_VARIABLE)
    if not path and SERVER_VARIABLE not in environ:
        return None, []
    if len(keys) > MAX_KEYS:
        raise ConfigError([f"{FILE_KEY}: there are {len(keys)} keys; the limit is {MAX_KEYS}"])
    if short := sum(len(key) < SHORT_CHARS for key in keys):
        warnings.append(
            f"{short} of {len(keys)} API keys are shorter than {SHORT_CHARS} characters and can be guessed; "
            "`openssl rand -hex 32` generates a better one"
        )
    return Keys.of(keys), warnings


def listed(text: str, origin: str) -> list[str]:
    """The keys in a text that separates them by commas or line breaks. `origin` is the name of what the user has set.
    Raises ConfigError; its message never contains a key."""
    return _of_lines(re.split(r"[,\n]", text), origin, "entry")


def keep_out_of_core_dumps() -> None:
    """Disable core dumps of this process and its children, because they would contain keys.

    If `core_pattern` pipes dumps to a program, a limit of 0 has no effect. A limit of 1 disables that too, and no file
    of 1 byte is written (fs/coredump.c). If the hard limit is 0, or the limit is raised later, a dump has no memory.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))
    with suppress(OSError):  # the kernel may not support it
        Path("/proc/self/coredump_filter").write_text("0")


def forget(environ: MutableMapping[str, str]) -> None:
    """Remove the keys from an environment, so that processes started later do not inherit them."""
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
        warnings.append(f"{FILE_KEY}: {path} can be read by other users; restrict it with chmod 600")
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
                    f"{origin}, {place} {number}: a key must have 1 to {MAX_KEY_CHARS} visible ASCII characters, "
                    "without spaces and commas"
                ]
            )
        keys.append(key)
    if not keys:  # an empty file or variable must not disable authentication
        raise ConfigError([f"{origin}: contains no key"])
    return keys


def scoped_salt(scope: str, salt: str) -> str:
    """The salt of a request's prefix-cache blocks: its `cache_salt` within its key's scope. No `cache_salt` leads out
    of the scope, because both are separate inputs of a keyed digest and the scope is secret. Without a scope, the salt
    is returned unchanged."""
    if scope == NO_SCOPE:
        return salt
    return hmac.digest(bytes.fromhex(scope), b"prefix cache\0" + salt.encode("utf-8", "surrogatepass"), "sha256").hex()


def scope_id(scope: str) -> str:
    """Identifies a scope to other stages and in recordings, from which the scope can't be computed."""
    if scope == NO_SCOPE:
        return ""
    return hashlib.blake2b(scope.encode(), digest_size=8, person=b"pipeline id").hexdigest()


def _digest(secret: bytes, key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=secret, digest_size=DIGEST_BYTES).digest()
