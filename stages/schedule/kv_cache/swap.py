"""Swap space: where KV blocks of preempted sequences wait, and the copies between it and the KV memory.

               take                       retire                    its step is settled
      free ───────────► held by a ────────────────────► retired ────────────────────────► free
                        swapped sequence

A swap block has the id `num_blocks` + its place, so that a copy is a pair of ids whichever memory they are in. Copies
of a step are made in the order in which they are listed, before anything of the step is computed and after all that
earlier steps compute: what leaves goes first, so a block may be given away by the plan that empties it.
"""

from collections import deque

import msgspec

COPY_WEIGHT = 0.2
"""Of the newest measurement in the mean time of a copy."""


class Swapped(msgspec.Struct, frozen=True):
    """What is kept of a sequence that was swapped out."""

    blocks: list[int]
    """Swap blocks, those of its first positions first."""
    num_computed: int
    """Positions whose keys and values they hold."""


class SwapSpace:
    """Owns which swap block is whose."""

    def __init__(self, num_blocks: int, first_id: int) -> None:
        self.num_total = num_blocks
        self._free = list(range(first_id + num_blocks - 1, first_id - 1, -1))
        self._retired: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """Those that `take` may give; for tests."""
        return frozenset(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Free swap blocks; the caller has made sure that there are so many."""
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        self._free += blocks
        assert len(self._free) <= self.num_total, "a swap block is released twice"

    def retire(self, blocks: list[int], step_id: int) -> None:
        """Release once `step_id`, which copies from them, is settled. Steps never go down from call to call."""
        assert not self._retired or self._retired[-1][0] <= step_id
        self._retired.append((step_id, blocks))

    def settle(self, step_id: int) -> None:
        """All steps up to `step_id` have run."""
        while self._retired and self._retired[0][0] <= step_id:
            self.release(self._retired.popleft()[1])

    def check(self, held: list[int]) -> None:
        """Assert that each block is free, retired or among `held`, and only there; for tests."""
        retired = [block for _, blocks in self._retired for block in blocks]
        everywhere = sorted(self._free + retired + held)
        assert len(everywhere) == self.num_total, "a swap block is lost, or there twice"
        assert len(set(everywhere)) == self.num_total, "a swap block is in two states"


class BlockCopies:
    """The copies that the next step carries, and how long one has taken."""

    def __init__(self) -> None:
        self._sources: list[int] = []
        self._targets: list[int] = []
        self.has_forks = False
        """Whether some of them are within the KV memory."""
        self.block_s = 0.0
        """Mean time of a copy to or from swap space, 0 until one was measured."""

    def add(self, sources: list[int], targets: list[int], is_fork: bool = False) -> None:
        self.has_forks |= is_fork
        assert len(sources) == len(targets)
        self._sources += sources
        self._targets += targets

    def take(self) -> tuple[list[int], list[int]]:
        """All that were added since the last call: sources and targets."""
        pairs = self._sources, self._targets
        self._sources, self._targets, self.has_forks = [], [], False
        return pairs

    def observe(self, num_blocks: int, seconds: float) -> None:
        """A step has made so many copies in this time."""
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (COPY_WEIGHT if self.block_s else 1.0)
