"""Copies between the KV cache and swap space, and within the KV cache.

Swap block i has the id `num_blocks` + i in a copy, so a copy is a pair of ids whichever memory they are in. A step
makes its copies in list order, after all computation of earlier steps and before its own. Copies out of the KV cache
are listed first, so the plan that empties a block can allocate it again.
"""

import msgspec

from pipeline.stages.schedule.kv_cache.tables import BlockTable

COPY_WEIGHT = 0.2
"""Weight of the newest measurement in the mean time of a copy."""


class Swapped(msgspec.Struct, frozen=True):
    """The KV of a sequence that was swapped out."""

    tables: list[BlockTable]
    """Blocks of swap space, in the order of positions, for each KV group."""
    num_computed: int
    """Positions whose KV they hold."""
    step_id: int = 0
    """The step that copies it there."""
    state: int = -1
    """With recurrent layers, the slot of swap space with the state behind these positions."""

    @property
    def blocks(self) -> list[int]:
        """Those of all groups."""
        return [block for table in self.tables for block in table.blocks]


class BlockCopies:
    """The copies of the next step, and the measured time of one copy."""

    def __init__(self, first_swap_id: int) -> None:
        """`first_swap_id` is the id of swap block 0."""
        self._first_swap_id = first_swap_id
        self._sources: list[int] = []
        self._targets: list[int] = []
        self.has_forks = False
        """Whether some copies are within the KV cache."""
        self.block_s = 0.0
        """Mean time to copy one block to or from swap space; 0 before the first measurement."""

    @property
    def num_swap_copies(self) -> int:
        """Copies of the next step to and from swap space; 0 if it makes other copies too, which can't be told apart in
        its time."""
        return 0 if self.has_forks else len(self._sources)

    @property
    def sources(self) -> list[int]:
        """What the next step copies."""
        return self._sources

    def out(self, blocks: list[int], swap_blocks: list[int]) -> None:
        """Copy blocks of the KV cache to swap space."""
        assert len(blocks) == len(swap_blocks)
        self._sources += blocks
        self._targets += [self._first_swap_id + block for block in swap_blocks]

    def back(self, swap_blocks: list[int], blocks: list[int]) -> None:
        """Copy blocks of swap space to the KV cache."""
        assert len(blocks) == len(swap_blocks)
        self._sources += [self._first_swap_id + block for block in swap_blocks]
        self._targets += blocks

    def fork(self, source: int, target: int) -> None:
        """Copy a block within the KV cache."""
        self.has_forks = True
        self._sources.append(source)
        self._targets.append(target)

    def take(self) -> tuple[list[int], list[int]]:
        """Take what was added since the last call: sources and targets."""
        pairs = self._sources, self._targets
        self._sources, self._targets, self.has_forks = [], [], False
        return pairs

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from a step that copied `num_blocks` blocks in `seconds`."""
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (COPY_WEIGHT if self.block_s else 1.0)
