"""Keys of KV blocks by content, so that prompts with a common prefix share blocks.

The key of block i is a hash of block i-1's key and the block's own ids: equal keys mean equal ids from the first on.
The hash also covers whatever else the KV depends on. A cache salt, which isolates clients' prompts, and an adapter's
name go into the root of the chain; the content of an image goes into the blocks that hold it.

128 bits of BLAKE2b prevent collisions, accidental or crafted. Described for paged KV in vLLM's "automatic prefix
caching" design page; the chain itself is a Merkle list.
"""

from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType

from pipeline.stages.schedule.arrays import Ids

KEY_BYTES = 16

GROUP_TAGS = [bytes([group]) for group in range(256)]

NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})


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


def tail_key(parent: bytes, ids: Ids) -> bytes:
    """The key of a block that is filled in part, with these ids (int32), behind the block with the key `parent`."""
    return blake2b(parent + ids.tobytes(), digest_size=KEY_BYTES, person=b"prefix tail").digest()


def extend(
    keys: list[bytes],
    ids: Ids,
    num_blocks: int,
    block_size: int,
    root: bytes = ROOT,
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> None:
    """Extend `keys` in place to one for each of the first `num_blocks` blocks of `ids` (int32). `extras` maps a
    block's index to the hash of what its KV depends on besides ids."""
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
