"""Keys of KV blocks by content, so that prompts with a common prefix share blocks.

The key of block i is a hash of block i-1's key and the block's own ids: equal keys mean equal ids from the first on.
The hash also covers whatever else the KV depends on. A cache salt, which isolates clients' prompts, and an adapter's
name go into the root of the chain; the content of an image goes into the blocks that hold it.

128 bits of BLAKE2b prevent collisions, accidental or crafted. Described for paged KV in vLLM's "automatic prefix
caching" design page; the chain itself is a Merkle list.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import Struct
from types import MappingProxyType

from pipeline.runtime.messages import MediaItem
from pipeline.stages.schedule.arrays import Ids

KEY_BYTES = 16

GROUP_TAGS = [bytes([group]) for group in range(256)]

NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})

_PART = Struct("<3I")
"""Of a part of a media item in a block: its first row, its place in the block, its length."""


def root(salt: str = "", adapter: str = "") -> bytes:
    """The key in front of the first block's: `KEY_BYTES` bytes."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (salt, adapter)]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=KEY_BYTES, person=b"prefix root").digest()


ROOT = root()


def unique_root(root: bytes, request_id: int) -> bytes:
    """A root that only this request has."""
    return blake2b(root + request_id.to_bytes(8, "little"), digest_size=KEY_BYTES, person=b"prefix apart").digest()


def group_key(key: bytes, group: int) -> bytes:
    """The key of a block in a KV group, given the chain's: the first group's is the same, others end with a byte
    more."""
    return key + GROUP_TAGS[group] if group else key


def tail_key(parent: bytes, ids: Ids, extra: bytes = b"") -> bytes:
    """The key of a block that is filled in part, with these ids (int32), behind the block with the key `parent`.
    `extra` is that of the full block."""
    return blake2b(parent + ids.tobytes() + extra, digest_size=KEY_BYTES, person=b"prefix tail").digest()


def media_extras(media: Sequence[MediaItem], block_size: int) -> dict[int, bytes]:
    """For `extend`: by index of a block, which rows of which items it has, and where. Adjacent images have the same
    ids, however these are divided between them, so the places count."""
    extras: dict[int, bytes] = {}
    for item in media:
        row = 0
        for offset, length in item.runs:
            for block in range(offset // block_size, (offset + length - 1) // block_size + 1):
                begin, end = max(offset, block * block_size), min(offset + length, (block + 1) * block_size)
                part = item.key + _PART.pack(row + begin - offset, begin - block * block_size, end - begin)
                extras[block] = extras.get(block, b"") + part
            row += length
    return extras


def extend(
    keys: list[bytes],
    ids: Ids,
    num_blocks: int,
    block_size: int,
    root: bytes = ROOT,
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> None:
    """Extend `keys` in place to one for each of the first `num_blocks` blocks of `ids` (int32). `extras` maps a
    block's index to what its KV depends on besides ids."""
    if len(keys) >= num_blocks:
        return
    data = ids[: num_blocks * block_size].tobytes()
    width = block_size * ids.itemsize
    key = keys[-1] if keys else root
    for index in range(len(keys), num_blocks):
        part = data[index * width : (index + 1) * width]
        if extras:
            part += extras.get(index, b"")
        key = blake2b(key + part, digest_size=KEY_BYTES).digest()
        keys.append(key)
