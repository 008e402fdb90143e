"""Swap space, which holds KV blocks of preempted sequences, and the copies between it and the KV cache.

               take                       retire                    its step is settled
      free ───────────► held by a ────────────────────► retired ────────────────────────► free
                        swapped sequence

Swap block i has the id `num_blocks` + i, so a copy is a pair of ids whichever memory they are in. A step makes its
copies in list order, after all computation of earlier steps and before its own. Swap-outs are listed first, so the plan
that empties a block can allocate it again.
"""

from collections import deque

import msgspec

COPY_WEIGHT = 0.2
"""Weight of the newest measurement in the mean time of a copy."""


class Swapped(msgspec.Struct, frozen=True):
    """The KV of a sequence that was swapped out."""

    blocks: list[int]
    """Swap blocks in the order of positions."""
    num_computed: int
    """Positions whose KV they hold."""
    step_id: int = 0
    """The step that copies it there."""


class SwapSpace:
    """Owns the state of each swap block."""

    def __init__(self, num_blocks: int, first_id: int) -> None:
        self.num_total = num_blocks
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))
        self._retired: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """The free blocks; for tests."""
        return frozenset(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Take free swap blocks. The caller has checked that there are enough."""
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        self._free += blocks
        assert len(self._free) <= self.num_total, "a swap block is released twice"

    def retire(self, blocks: list[int], step_id: int) -> None:
        """Release the blocks once `step_id`, which copies from them, is settled. Step ids must not decrease."""
        assert not self._retired or self._retired[-1][0] <= step_id
        self._retired.append((step_id, blocks))

    def settle(self, step_id: int) -> None:
        """Release what was retired until `step_id`."""
        while self._retired and self._retired[0][0] <= step_id:
            self.release(self._retired.popleft()[1])

    def settle_all(self) -> None:
        """Release all that was retired."""
        if self._retired:
            self.settle(self._retired[-1][0])

    def check(self, held: list[int]) -> None:
        """Assert that each block is free, retired or among `held`, and only there; for tests."""
        retired = [block for _, blocks in self._retired for block in blocks]
        everywhere = sorted(self._free + retired + held)
        assert len(everywhere) == self.num_total, "a swap block is lost, or there twice"
        assert len(set(everywhere)) == self.num_total, "a swap block is in two states"


class BlockCopies:
    """The copies of the next step, and the measured time of one copy."""

    def __init__(self) -> None:
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

    def add(self, sources: list[int], targets: list[int], is_fork: bool = False) -> None:
        self.has_forks |= is_fork
        assert len(sources) == len(targets)
        self._sources += sources
        self._targets += targets

    def take(self) -> tuple[list[int], list[int]]:
        """Take what was added since the last call: sources and targets."""
        pairs = self._sources, self._targets
        self._sources, self._targets, self.has_forks = [], [], False
        return pairs

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from a step that copied `num_blocks` blocks in `seconds`."""
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (COPY_WEIGHT if self.block_s else 1.0)
