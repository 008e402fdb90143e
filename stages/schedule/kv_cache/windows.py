"""The blocks of running rows in KV groups with a window: which ones a row no longer needs, and which ones it lacks.

A row's tables of such groups don't have places for all its ids. They grow before each step, and blocks that the window
has left are released when the next step is planned. What is released must not be needed again if the row is preempted:
it then continues behind its settled ids (`PreemptionCosts.num_kept`), so the window is counted from there.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.metrics.stats import KVGroupCounts
from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

FEW_ROWS = 32
"""For more rows, operations on arrays take less time than a loop."""


class AppendedBlocks:
    """Blocks that a plan appends to rows; parallel lists."""

    __slots__ = ("blocks", "groups", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.blocks: list[int] = []
        self.groups: list[int] = []
        """KV groups; may be empty if there is only one."""


class WindowBlocks:
    """Reads and changes the block tables of rows."""

    def __init__(self, config: SchedulerConfig, rows: RowTracker, pool: BlockPool) -> None:
        self._rows = rows
        self._pool = pool
        self._block_size = config.block_size
        self._max_chunk = config.max_chunk
        self._groups = config.kv_groups
        self.by_window: dict[int, list[int]] = {}
        """By window: the groups that have it. Their tables have the same places."""
        for index, group in enumerate(config.kv_groups):
            if group.window:
                self.by_window.setdefault(group.window, []).append(index)

        self.is_plain = len(config.kv_groups) == 1 and not self.by_window
        """There is one group, without a window: a running row needs at most one block in a step, and keeps all."""

    def take_passed(self) -> Iterator[tuple[int, int, list[int]]]:
        """Remove the blocks that no later step reads from the tables. Yields rows, groups and blocks."""
        if not self.by_window:
            return
        rows, order = self._rows, self._rows.order
        positions = np.minimum(rows.num_computed_tokens[order], rows.num_tokens[order] - 1)
        for window, groups in self.by_window.items():
            firsts = (positions - window + 1) // self._block_size
            passed = firsts > rows.block_firsts[groups[0], order]
            for index in passed.nonzero()[0].tolist() if np.count_nonzero(passed) else ():
                row, first = int(order[index]), int(firsts[index])
                begin = int(rows.block_firsts[groups[0], row])
                for group in groups:
                    blocks: list[int] = rows.tables[group, row, begin:first].tolist()
                    rows.block_firsts[group, row] = first
                    yield row, group, blocks

    def has_blocks_from(self, row: int, firsts: list[int]) -> bool:
        """Whether a row still has its blocks from these places on, one for each group."""
        return all(self._rows.block_firsts[group, row] <= first for group, first in enumerate(firsts))

    def num_lacking(self, row: int, num_positions: int) -> int:
        """Blocks, of all groups, that a row lacks to hold `num_positions` positions; at least one."""
        if self.is_plain:
            return 1
        end = -(-num_positions // self._block_size)
        return sum(max(0, end - have) for have in self._rows.block_ends[:, row].tolist())

    def append_all(self, order: Int64s, num_positions: Int64s) -> AppendedBlocks | None:
        """Append blocks to these rows until each can hold its number of positions, or return None if there are too few
        blocks for all."""
        rows, appended = self._rows, AppendedBlocks()
        if self.is_plain and len(order) <= FEW_ROWS:
            if len(order) > self._pool.num_available:
                return None
            for row in order.tolist():
                self._append_one(row, appended)
            return appended
        lacking = (-(-num_positions // self._block_size) - rows.block_ends[:, order]).clip(0)
        if lacking.sum() > self._pool.num_available:
            return None
        for group, nums in enumerate(lacking):
            if not (num := int(nums.sum())):
                continue
            blocks = self._pool.take_some(num)
            ends, targets = rows.block_ends[group], order.repeat(nums)
            indices = ends[targets] + np.arange(num) - (nums.cumsum() - nums).repeat(nums)
            rows.tables[group, targets, indices] = blocks
            ends[order] += nums
            appended.rows += targets.tolist()
            appended.blocks += blocks
            appended.groups += [group] * num
        if len(lacking) > 1:
            rows.num_blocks[order] = rows.block_ends[:, order].min(axis=0)
        return appended

    def _append_one(self, row: int, appended: AppendedBlocks) -> None:
        """Append a block to a row of the only group."""
        block = self._pool.take()
        self._rows.append_block(0, row, block)
        appended.rows.append(row)
        appended.blocks.append(block)

    def fitting(self, row: int, num_positions: int) -> int:
        """The most positions, up to `num_positions`, that a row can hold with the blocks that are available now."""
        end, least = -(-num_positions // self._block_size), int(self._rows.num_blocks[row])
        while end > least and self.num_lacking(row, end * self._block_size) > self._pool.num_available:
            end -= 1
        return min(num_positions, end * self._block_size)

    def append(self, row: int, num_positions: int, appended: AppendedBlocks) -> None:
        """Append blocks to a row until it can hold `num_positions` positions. They must be available."""
        rows, pool = self._rows, self._pool
        if self.is_plain:
            self._append_one(row, appended)
            return
        end = -(-num_positions // self._block_size)
        for group, have in enumerate(rows.block_ends[:, row].tolist()):
            for _ in range(end - have):
                block = pool.take()
                rows.append_block(group, row, block)
                appended.rows.append(row)
                appended.blocks.append(block)
                appended.groups.append(group)
        rows.num_blocks[row] = rows.block_ends[:, row].min()

    def are_enough(self, num_rows: int) -> bool:
        """Whether any step of `num_rows` running rows finds the blocks that it needs."""
        num_groups = len(self._groups)
        if not self.by_window:
            return self._pool.num_available >= num_rows
        num_chunk_blocks = self._max_chunk // self._block_size + 1
        return self._pool.num_available >= num_groups * (num_rows + num_chunk_blocks)

    def counts(self) -> list[KVGroupCounts]:
        """The blocks of running sequences in each group."""
        rows, order = self._rows, self._rows.order
        nums = (rows.block_ends[:, order] - rows.block_firsts[:, order]).sum(axis=1).tolist()
        return [KVGroupCounts(group.window, num) for group, num in zip(self._groups, nums, strict=True)]

    def check(self, row: int) -> None:
        """Assert that a row has the blocks that its next position reads, and not many more; for tests."""
        rows = self._rows
        position = int(min(rows.num_computed_tokens[row], rows.num_tokens[row] - 1))
        for index, group in enumerate(self._groups):
            first = int(rows.block_firsts[index, row])
            assert first <= group.first_block(position, self._block_size), f"row {row} lacks a block of its window"
            assert first <= rows.block_ends[index, row]
