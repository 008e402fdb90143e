"""Names for KV blocks by content, so that prompts which begin alike share them.

The key of block i is a hash of block i-1's key and the block's own ids: equal keys mean equal ids from the first on.
128 bits of BLAKE2b keep strangers' prompts from meeting by accident or by design. Proposed for paged KV by vLLM's
"automatic prefix caching" design page; the chain itself is a Merkle list.
"""

from hashlib import blake2b

from pipeline.stages.schedule.request import Ids

ROOT = b""


def extend(keys: list[bytes], ids: Ids, num_blocks: int, block_size: int) -> None:
    """Extend `keys` in place until the first `num_blocks` blocks of `ids` (int32) have one each."""
    if len(keys) >= num_blocks:
        return
    data = ids[: num_blocks * block_size].tobytes()
    width = block_size * ids.itemsize
    key = keys[-1] if keys else ROOT
    for start in range(len(keys) * width, num_blocks * width, width):
        key = blake2b(key + data[start : start + width], digest_size=16).digest()
        keys.append(key)
