"""Names for KV blocks by content, so that prompts which begin alike share them.

The key of block i is a hash of block i-1's key and the block's own ids: equal keys mean equal ids from the first on.
What else decides keys and values goes in too: a salt, with which clients keep their prompts to themselves, and an
adapter's name into the root of the chain; the content of images into the blocks that they lie in.

128 bits of BLAKE2b keep strangers' prompts from meeting by accident or by design. Proposed for paged KV by vLLM's
"automatic prefix caching" design page; the chain itself is a Merkle list.
"""

from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType

from pipeline.stages.schedule.arrays import Ids

NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})


def root(salt: str = "", adapter: str = "") -> bytes:
    """What stands before the first block's key: 16 bytes."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (salt, adapter)]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=16, person=b"prefix root").digest()


ROOT = root()


def apart(root: bytes, request_id: int) -> bytes:
    """A root that no other request has."""
    return blake2b(root + request_id.to_bytes(8, "little"), digest_size=16, person=b"prefix apart").digest()


def extend(
    keys: list[bytes],
    ids: Ids,
    num_blocks: int,
    block_size: int,
    root: bytes = ROOT,
    extras: Mapping[int, bytes] = NO_EXTRAS,
) -> None:
    """Extend `keys` in place until the first `num_blocks` blocks of `ids` (int32) have one each. `extras` has the hash
    of what a block's keys and values depend on besides ids, by the block's place."""
    if len(keys) >= num_blocks:
        return
    data = ids[: num_blocks * block_size].tobytes()
    width = block_size * ids.itemsize
    key = keys[-1] if keys else root
    for place in range(len(keys), num_blocks):
        part = data[place * width : (place + 1) * width]
        if extras:
            part += extras.get(place, b"")
        key = blake2b(key + part, digest_size=16).digest()
        keys.append(key)
