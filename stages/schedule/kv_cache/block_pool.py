"""A pool of KV blocks: those of the KV cache, or those of swap space.

                take                       release, last reference
      free ───────────► held (1..n refs) ─────────────────────────► free      if it has no key
       ▲                  ▲       │                                 cached    if it has one
       │            hold  │       │ release
       │                  │       ▼
       └── evict ◄───── cached (no refs; least recently used goes first)

free + cached + held == total, always. A block with a key can be found by it whether it is held or cached. Blocks that a
step in flight names are retired, not released: they stay held until that step is settled. Likewise, a key is stored in
the index, for the successor of this process, when the step that writes the block is settled.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice

from pipeline.stages.schedule.kv_cache.block_index import BlockIndex


class BlockPool:
    """Owns the state of each block. Every operation takes O(1) per block."""

    def __init__(self, num_blocks: int, index: BlockIndex | None = None) -> None:
        self.num_total = num_blocks
        self._index = BlockIndex(None, 0) if index is None else index
        self._written: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        """Blocks whose key is not in the index yet: the step that writes them, and the key."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._retired: deque[tuple[int, list[int]]] = deque()
        self.num_retired = 0
        """References to be released when their step is settled."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_total - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """A block without a key, held once. The caller has checked that one is available."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._evicted()
            del self._cached[block]
            self._forget(block)
        self._refs[block] = 1
        return block

    def _evicted(self) -> int:
        """The cached block to evict."""
        return next(iter(self._cached))

    def take_some(self, num_blocks: int) -> list[int]:
        """The blocks of as many calls of `take`."""
        if len(self._free) < num_blocks:
            return [self.take() for _ in range(num_blocks)]
        blocks = self._free[: -num_blocks - 1 : -1]
        del self._free[len(self._free) - num_blocks :]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def adopt(self, keys: dict[int, bytes]) -> None:
        """Let free blocks be found by these keys. If two have the same, either is."""
        known = {key: block for block, key in keys.items() if key not in self._by_key}
        blocks = set(known.values()).intersection(self._free)
        self._free = [block for block in self._free if block not in blocks]
        for block in blocks:
            self._keys[block] = keys[block]
            self._by_key[keys[block]] = block
            self._cached[block] = None
        for block in keys.keys() - blocks:
            self._index.clear(block)

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._by_key.get(key)

    def num_refs(self, block: int) -> int:
        """Number of references to the block."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block has a key and no holder. To hold it leaves one block less available."""
        return block in self._cached

    def is_shared(self, block: int) -> bool:
        """Whether a held block has other holders, or a key by which others may find it: nothing may write to it."""
        return self._refs[block] > 1 or self._keys[block] is not None

    def hold(self, block: int) -> None:
        """Add a reference to a block that was found."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def claim(self, block: int) -> None:
        """Hold a cached block that was found, alone: it gets other content, so its key goes."""
        self.hold(block)
        assert self._refs[block] == 1, f"block {block} is shared"
        self._forget(block)

    def register(self, block: int, key: bytes, step_id: int = 0) -> None:
        """Let a held block be found by its content, which is there when `step_id` is settled. If another block has the
        key already, that one keeps it. Step ids must not decrease from call to call."""
        assert self._refs[block] > 0, f"block {block} is not held"
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block
            self._written[block] = step_id, key

    def forget(self, block: int) -> None:
        """Remove the block's key, if it has one: its content can't be found any more."""
        if self._keys[block] is None:
            return
        self._forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block. Pass a block table from tail to head: blocks released first are evicted
        first, and a prefix is worth more than its continuation."""
        for block in blocks:
            refs = self._refs[block]
            assert refs > 0, f"block {block} is released twice"
            self._refs[block] = refs - 1
            if refs == 1:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def retire(self, blocks: list[int], step_id: int) -> None:
        """Release the blocks once `step_id` is settled. Step ids must not decrease from call to call."""
        assert not self._retired or self._retired[-1][0] <= step_id
        self._retired.append((step_id, blocks))
        self.num_retired += len(blocks)

    def release_after(self, blocks: list[int], step_id: int | None) -> None:
        """Release the blocks once `step_id` is settled; with None, at once."""
        if step_id is None:
            self.release(blocks)
        else:
            self.retire(blocks, step_id)

    def retired(self) -> Iterator[list[int]]:
        """The references that steps in flight will release."""
        return (blocks for _, blocks in self._retired)

    def settle(self, step_id: int) -> None:
        """Release what was retired until `step_id`."""
        while self._retired and self._retired[0][0] <= step_id:
            _, blocks = self._retired.popleft()
            self.num_retired -= len(blocks)
            self.release(blocks)
        written = self._written
        while written and next(iter(written.values()))[0] <= step_id:
            block, (_, key) = written.popitem(last=False)
            self._index.set(block, key)

    def forget_unwritten(self) -> None:
        """Remove the keys of blocks whose step is not settled: it will never be."""
        for block in list(self._written):
            self.forget(block)

    def settle_all(self) -> None:
        """Release all that was retired. No key is stored in the index."""
        self._written.clear()
        if self._retired:
            self.settle(self._retired[-1][0])

    def forget_all(self, owner: int | None = None) -> int:
        """Remove every key, and free the blocks without a holder. Returns how many blocks had a key. With `owner`, the
        blocks belong to that from now on."""
        self._written.clear()
        self._index.clear_all(owner)
        num_forgotten = len(self._by_key)
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()
        self._free += self._cached
        self._cached.clear()
        return num_forgotten

    def held(self) -> list[int]:
        """The blocks that have holders."""
        return [block for block, refs in enumerate(self._refs) if refs]

    def newest_cached(self, num_blocks: int) -> Iterator[int]:
        """Cached blocks, at most so many: those that would be evicted last."""
        return islice(reversed(self._cached), num_blocks)

    def keep_only(self, blocks: list[int], owner: int) -> None:
        """From now on the blocks belong to `owner`, in which only these have their content. All others lose their
        keys."""
        kept = set(blocks)
        for block in [block for block in self._by_key.values() if block not in kept]:
            self.forget(block)
        self._index.give_to(owner)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.num_total, "a block is in no state"
        assert all(self._keys[block] is None for block in free), "a free block has a key"
        assert all(self._keys[block] is not None for block in cached), "a cached block has no key"
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key points at the wrong block"
        assert sum(key is not None for key in self._keys) == len(self._by_key), "a block's key is not in the index"
        assert self.num_retired == sum(len(blocks) for _, blocks in self._retired)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        if self._written.pop(block, None) is None:
            self._index.clear(block)
