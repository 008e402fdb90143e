"""Keys of a prompt's prefixes: chained hashes, so that equal keys mean equal bytes from the first on.

A router often has no tokenizer, so it hashes bytes: the messages in a canonical form, one after the other, cut into
chunks of equal length. The next turn of a chat begins with the bytes of this one, and so with its keys. Only whole
chunks have a key. Where token ids are known, blocks of ids take the place of chunks.

A collision sends a request to a replica without its prefix, and does nothing else, so 64 bits are enough.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

CHUNK_BYTES = 1024
"""Bytes of a chunk."""
BYTES_PER_TOKEN = 4
"""Typical of English text."""
MAX_KEYS = 4096
"""Keys of a prompt. What follows has none, so a long prompt costs a bounded time."""
ID_BYTES = 4
_KEY_BYTES = 8
_encoder = msgspec.json.Encoder(order="sorted")


def root(model: str = "", salt: str = "", scope: str = "") -> int:
    """The key in front of the first one. Prompts for other models, with other cache salts, or of API keys with other
    scopes, share no prefix."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, salt, *([scope] if scope else []))]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(blake2b(framed, digest_size=_KEY_BYTES, person=b"route root").digest(), "little")


ROOT = root()


def message_bytes(messages: Iterable[Any], tools: Any = None) -> bytes:
    """The canonical bytes of a chat: its tools, which templates put first, then each message as JSON with sorted keys.
    `messages` and `tools` are as a body has them after decoding. Raises TypeError if they are not plain JSON."""
    parts = [] if tools is None else [_encoder.encode(tools)]
    parts += [_encoder.encode(message) for message in messages]
    return b"".join(parts)


def keys_of(data: bytes, chunk_bytes: int = CHUNK_BYTES, root: int = ROOT, max_keys: int = MAX_KEYS) -> list[int]:
    """The keys of the whole chunks of `data`, u64 each."""
    keys: list[int] = []
    digest = root.to_bytes(_KEY_BYTES, "little")
    view = memoryview(data)
    for index in range(min(len(data) // chunk_bytes, max_keys)):
        part = view[index * chunk_bytes : (index + 1) * chunk_bytes]
        digest = blake2b(part, digest_size=_KEY_BYTES, key=digest).digest()
        keys.append(int.from_bytes(digest, "little"))
    return keys


def token_keys(ids: bytes, block_tokens: int, root: int = ROOT, max_keys: int = MAX_KEYS) -> list[int]:
    """The keys of whole blocks of token ids, which `ids` has as int32."""
    return keys_of(ids, block_tokens * ID_BYTES, root, max_keys)
