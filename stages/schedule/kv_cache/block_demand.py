"""Whether sequences could start if some rows were preempted: a count of blocks that changes nothing."""

from collections.abc import Callable

from pipeline.stages.schedule.kv_cache.block_pool import BlockPool


class BlockDemand:
    """How many blocks some sequences need to start, and how many they would have if some rows were preempted, once the
    steps in flight are settled."""

    def __init__(
        self, pool: BlockPool, num_needed: int, shared: set[int], may_start: Callable[[int, int, int], bool]
    ) -> None:
        """`shared` are blocks that the sequence will hold itself: they never become available. `may_start` is
        KVCacheManager.may_start."""
        self._pool = pool
        self._may_start = may_start
        self._num_needed = num_needed
        self._shared = shared
        self._num_available = pool.num_available
        self._num_released: dict[int, int] = {}
        for blocks in pool.retired():
            self.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Assume that one reference of each of these blocks is released."""
        for block in blocks:
            count = self._num_released[block] = self._num_released.get(block, 0) + 1
            if count == self._pool.num_refs(block) and block not in self._shared:
                self._num_available += 1

    def add(self, num_blocks: int) -> None:
        """Add the blocks that another sequence needs."""
        self._num_needed += num_blocks

    def is_met(self, num_running: int) -> bool:
        """Whether the sequences could start beside `num_running` rows."""
        return self._may_start(self._num_available, self._num_needed, num_running)
