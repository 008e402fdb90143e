"""API keys: how a server checks a client's key, and what it knows of it.

No key is stored. The supervisor reads the keys (key_book.py), computes a digest of each with a secret drawn at this
start, and passes the digests and the secret to the gateways in a memfd. So no key is in the settings, a stage's
`Launch`, a recording, a command line or a stage's environment, and a leaked digest is worthless after the next start.

    files, digests, PIPELINE_API_KEYS ──KeyBook──► Keys ──memfd──► gateway ──scope_of(key)──► accepted, or 401
                    └── again: pipeline reload ──► Keys ──write──► ───┘ RereadKeys
"""

import hashlib
import hmac
import os
import re
import resource
import secrets
import time
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path

import msgspec

SERVER_VARIABLE = "PIPELINE_API_KEYS"
"""A server's environment variable: its keys, separated by commas or line breaks."""
CLIENT_VARIABLE = "PIPELINE_API_KEY"
"""A client's environment variable: the default key."""
FILE_KEY = "gateway.api_keys_file"

MAX_KEYS = 1024
"""Bounded, because each request's key is compared with all keys."""
MAX_SLOTS = 4096
"""Names that a server may have in its life, those of keys that were taken out too."""
MAX_KEY_CHARS = 512
SHORT_CHARS = 16
"""Shorter keys can be guessed."""
MAX_FILE_BYTES = 1024**2
DIGEST_BYTES = 32
SCOPE_BYTES = 32
NUM_READS, READ_AGAIN_S = 100, 0.001
"""A gateway that starts while the keys are replaced reads them again."""
NO_SCOPE = ""
"""The scope of requests without an API key."""

_BEARER = re.compile(rf"bearer +([!-~]{{1,{MAX_KEY_CHARS}}})", re.IGNORECASE | re.ASCII)


class ApiKey(msgspec.Struct, frozen=True, array_like=True):
    """What a server knows of a key besides its digest."""

    name: str
    slot: int
    """Of its counts; see key_usage.py. Keys with one name share it."""
    rpm: int = 0
    """Requests in a minute; 0: no limit."""
    tpm: int = 0
    """Tokens in a minute; 0: no limit."""
    models: tuple[str, ...] = ()
    """Names that it may use; empty: all."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    secret: bytes
    digests: list[bytes]
    keys: list[ApiKey]
    """One for each digest."""


class Keys:
    """Digests of the keys that a server accepts, and what it knows of each. `use` changes them."""

    def __init__(self, secret: bytes, digests: Iterable[bytes], keys: Iterable[ApiKey]) -> None:
        self._packed = _Packed(secret, list(digests), list(keys))
        self._use(self._packed)

    def _use(self, packed: _Packed) -> None:
        scopes = {one.name: _scope(packed.secret, one.name) for one in packed.keys}
        self._packed = packed
        self._scopes = [scopes[one.name] for one in packed.keys]
        self._by_scope = dict(zip(self._scopes, packed.keys, strict=True))

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Keys":
        """Keys without names of their own."""
        secret = secrets.token_bytes(DIGEST_BYTES)
        digests = [keyed(secret, sha256(key)) for key in dict.fromkeys(keys)]
        return cls(secret, digests, (ApiKey(unnamed(index), index) for index, _ in enumerate(digests)))

    def __len__(self) -> int:
        return len(self._packed.digests)

    def __repr__(self) -> str:
        return f"Keys(<{len(self)}>)"

    @property
    def all(self) -> list[ApiKey]:
        """One for each name, in order."""
        return list(self._by_scope.values())

    def described(self) -> dict[str, tuple[ApiKey, frozenset[bytes]]]:
        """Each name, with what is known of it and its digests."""
        found = {one.name: (one, frozenset[bytes]()) for one in self._packed.keys}
        for one, digest in zip(self._packed.keys, self._packed.digests, strict=True):
            found[one.name] = one, found[one.name][1] | {digest}
        return found

    def change_to(self, keys: "Keys") -> str:
        """What differs between these keys and others, in words; empty if nothing does."""
        before, after = self.described(), keys.described()
        names = {
            "added": [name for name in after if name not in before],
            "changed": [name for name in after if name in before and before[name] != after[name]],
            "removed": [name for name in before if name not in after],
        }
        return "; ".join(f"{what} {', '.join(found)}" for what, found in names.items() if found)

    def scope_of(self, key: str | None) -> str | None:
        """The scope of a client's key: an id that is the same in all gateways of this start and that can't be computed
        without the secret. Keys with one name have one scope. None if the key is not one of these.

        The time depends only on the length of `key`: the digest is compared in constant time, and with all keys."""
        digest = keyed(self._packed.secret, sha256(key or ""))
        found = -1
        for index, one in enumerate(self._packed.digests):
            found += (index - found) * hmac.compare_digest(one, digest)
        return self._scopes[found] if found >= 0 and key else None

    def of_scope(self, scope: str) -> ApiKey | None:
        """The key with this scope; None if there is none, or not any more."""
        return self._by_scope.get(scope)

    def packed(self) -> bytes:
        """The secret and the digests, for `unpacked` in another process. No key can be read from them, but short keys
        can be guessed by them."""
        return msgspec.msgpack.encode(self._packed)

    @classmethod
    def unpacked(cls, data: bytes) -> "Keys":
        """The keys of `packed`. Raises ValueError."""
        packed = _unpacked(data)
        return cls(packed.secret, packed.digests, packed.keys)

    def use(self, keys: "Keys") -> None:
        """Accept these keys from now on, and no others."""
        self._use(keys._packed)

    def share(self) -> int:
        """Write the digests to a memfd for `inherited`. The caller owns the descriptor."""
        fd = os.memfd_create("pipeline-keys")
        self.write(fd)
        return fd

    def write(self, fd: int) -> None:
        """Replace what `share` has written. A reader at the same time gets the one or the other."""
        data = self.packed()
        os.pwrite(fd, hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() + data, 0)
        os.ftruncate(fd, DIGEST_BYTES + len(data))

    @classmethod
    def inherited(cls, fd: int) -> "Keys":
        """The keys that `share` or `write` wrote. The descriptor stays open and may be read again. Raises ValueError,
        also if they are being written all the time."""
        for _ in range(NUM_READS):
            data = os.pread(fd, max(1, os.fstat(fd).st_size), 0)
            begin, data = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
            if hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() == begin:
                return cls.unpacked(data)
            time.sleep(READ_AGAIN_S)
        raise ValueError(f"{len(data)} bytes are not valid keys")


def bearer(headers: list[str]) -> str | None:
    """The key in a request's Authorization headers; None unless there is exactly one."""
    match = _BEARER.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    return match[1] if match else None


def of_client(given: str | None) -> str | None:
    """The key that a client sends: `given`, or the one in its environment."""
    return given if given is not None else os.environ.get(CLIENT_VARIABLE) or None


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


def unnamed(index: int) -> str:
    """The name of a key that was given none."""
    return f"key-{index + 1}"


def sha256(key: str) -> bytes:
    """The digest of a key that a settings file may have."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def keyed(secret: bytes, digest: bytes) -> bytes:
    """The digest of a key's `sha256` that the processes have."""
    return hashlib.blake2b(digest, key=secret, digest_size=DIGEST_BYTES).digest()


def _scope(secret: bytes, name: str) -> str:
    return hashlib.blake2b(name.encode(), key=secret, digest_size=SCOPE_BYTES, person=b"pipeline scope").hexdigest()


def _unpacked(data: bytes) -> _Packed:
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
    except msgspec.DecodeError:
        packed = None
    if packed is None or not packed.digests or len(packed.digests) != len(packed.keys):
        raise ValueError(f"{len(data)} bytes are not valid keys")
    return packed
