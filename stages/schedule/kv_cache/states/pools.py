"""The slots of the executor and those of swap space, and what is found in them."""

from pipeline.stages.schedule.kv_cache.block_index import NO_MEMORY, BlockIndex, IndexMemory, unpacked
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class SlotPool(BlockPool):
    """Evicts spare snapshots first."""

    def __init__(self, num_slots: int, index: BlockIndex) -> None:
        super().__init__(num_slots, index)
        self._spare: set[int] = set()
        self.num_evictions = 0

    def set_spare(self, slot: int, *, is_spare: bool) -> None:
        """`is_spare` is as in `StateCut`. Once a snapshot was found, it isn't."""
        (self._spare.add if is_spare else self._spare.discard)(slot)

    def forget_spare(self, key: bytes) -> None:
        """Free the slot with this key, if it is spare and has no holder."""
        slot = self.find(key)
        if slot is not None and slot in self._spare and self.is_cached(slot):
            self.forget(slot)

    def forget_all(self, owner: int | None = None) -> int:
        self._spare.clear()
        return super().forget_all(owner)

    def check(self) -> None:
        super().check()
        assert all(self._keys[slot] is not None for slot in self._spare), "a slot without a key is spare"

    def _evicted(self) -> int:
        self.num_evictions += 1
        return next((slot for slot in self._cached if slot in self._spare), next(iter(self._cached)))

    def _forget(self, block: int) -> None:
        super()._forget(block)
        self._spare.discard(block)


class StatePools:
    """A snapshot has the key of the block that ends where it was made. One of a sequence that ends between two blocks,
    for the process after this one, has the key of the tail (partial_blocks.py)."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: IndexMemory = NO_MEMORY,
        swap_index: IndexMemory = NO_MEMORY,
        executor: int = 1,
    ) -> None:
        """The indices are those of the slots and of swap space. `executor` is the incarnation of the executor's
        process, which owns the slots."""
        states = config.states
        self.is_on = states.num_slots > 0
        self.offloads = config.offloads and states.num_swap_slots > 0
        """Whether snapshots are copied to swap space at once, and found there."""
        block_index = BlockIndex(index.memory, states.num_slots, owner=executor, keeps=config.prefix_caching)
        self.slots = SlotPool(states.num_slots, block_index)
        if self.is_on and config.prefix_caching:
            self.slots.adopt(dict(unpacked(index.observe(block_index.entries()))))
        block_index = BlockIndex(swap_index.memory, states.num_swap_slots, keeps=self.offloads)
        self.swap = SlotPool(states.num_swap_slots, block_index)
        if self.offloads:
            self.swap.adopt(dict(unpacked(swap_index.observe(block_index.entries()))))

    def find(self, key: bytes, *, with_swap: bool = False) -> int | None:
        """The slot with this key; ~s is slot s of swap space."""
        slot = self.slots.find(key)
        if slot is None and with_swap and (swap_slot := self.swap.find(key)) is not None:
            return ~swap_slot
        return slot

    def longest(self, keys: list[bytes], *, with_swap: bool) -> int:
        """The longest prefix of the blocks with these keys behind which there is a state: its number of blocks."""
        num_blocks = len(keys)
        while num_blocks and self.find(keys[num_blocks - 1], with_swap=with_swap) is None:
            num_blocks -= 1
        return num_blocks

    def has_tail(self, key: bytes) -> bool:
        """Whether there is a state behind the tail with this key, for one sequence, or none is needed."""
        return not self.is_on or ((slot := self.slots.find(key)) is not None and self.slots.is_cached(slot))
