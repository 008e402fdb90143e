"""What the executor saves of the KV cache when the server goes to sleep. Its successor has it in the same blocks and
slots, so block tables, references and keys stay as they are.

    held                             saved: rows read it
    read by a copy of the next step  saved
    cached                           the newest, as far as they fit into `execute.sleep_cache_bytes`; others are
                                     forgotten when the executor has ended
"""

from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.kv_cache.swap import BlockCopies


class SavedCache:
    """Chooses what is saved. No plan may be made between a choice and `taken_over`."""

    def __init__(self, manager: KVCacheManager, block_bytes: int, slot_bytes: int, max_cached_bytes: int) -> None:
        """`max_cached_bytes` is for cached blocks and, with recurrent layers, half of it for snapshots."""
        self._manager = manager
        share = max_cached_bytes // 2 if manager.states.is_on else max_cached_bytes
        self._max_cached_blocks = share // block_bytes if block_bytes else 0
        self._max_cached_slots = share // slot_bytes if slot_bytes else 0
        self._blocks: list[int] = []
        self._slots: list[int] = []

    def choose(self) -> tuple[list[int], list[int]]:
        """The blocks and the slots to save, in ascending order. No step may be in flight."""
        manager = self._manager
        self._blocks = _chosen(manager.pool, manager.copies, self._max_cached_blocks)
        states = manager.states
        self._slots = _chosen(states.pool, states.copies, self._max_cached_slots) if states.is_on else []
        return self._blocks, self._slots

    def taken_over(self, successor: int) -> None:
        """The executor has ended. Its successor, with this incarnation, has what was chosen, and nothing else."""
        self._manager.pool.keep_only(self._blocks, successor)
        if self._manager.states.is_on:
            self._manager.states.pool.keep_only(self._slots, successor)


def _chosen(pool: BlockPool, copies: BlockCopies, max_cached: int) -> list[int]:
    cached = list(pool.newest_cached(max_cached))
    sources = [block for block in copies.sources if block < pool.num_total]
    return sorted({*pool.held(), *cached, *sources})
