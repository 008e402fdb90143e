"""What a step changes before it is computed, on any device: its rows and blocks, and its copies of blocks."""

from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
import numpy as np

from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.messages import ADAPTER_FAILED, ExecuteFacts, GenerationOptions, Step
from pipeline.stages.execute.adapters.slots import AdapterSlots
from pipeline.stages.execute.grammar_masks.masks import Masks
from pipeline.stages.execute.pooling.pool import Pool
from pipeline.stages.execute.rows import GroupArray, RowTable, Take
from pipeline.stages.execute.sampling_features import SamplingFeature


class RowMirror(Protocol):
    """A copy of the row table on a device, which follows every change."""

    def add(self, row: int) -> str | None:
        """Copy a row that was added to the table. Returns an error if its sequence can't run."""

    def append_blocks(self, rows: IntArray, blocks: IntArray, groups: GroupArray) -> object:
        """Append blocks to the table and to the mirror."""

    def drop(self, rows: IntArray) -> None:
        """Drop rows that were dropped from the table."""


class RowChanges:
    """Applies the row changes of steps to everything that keeps state by row."""

    def __init__(
        self,
        table: RowTable,
        masks: Masks,
        pool: Pool,
        eos_ids: Collection[int],
        mirror: RowMirror | None = None,
        drop_drafts: Callable[[IntArray], None] | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._table, self._masks, self._pool, self._eos_ids = table, masks, pool, eos_ids
        self._mirror, self._drop_drafts, self._adapters = mirror, drop_drafts, adapters
        self._options = msgspec.msgpack.Decoder(GenerationOptions)
        self._last_options = b"", GenerationOptions()
        """Those of the last row that was added, packed and decoded."""
        self.failed: dict[int, str] = {}
        """Rows whose sequence can't continue, and why. The row's next sampled id is then `NO_ID`, with this error."""

    def apply(self, step: Step, take: Take) -> None:
        """Drop rows, add rows and append blocks, in this order."""
        table, mirror = self._table, self._mirror
        if len(drops := take(step.drops, np.int32)):
            self._drop(drops)
        for add in step.adds:
            options = self._options_of(add.options)
            table.take_in(add, options, self._eos_ids, take)
            if options.adapter_id:
                self._take_adapter(add.row, options.adapter_id)
            if mirror is not None and (error := mirror.add(add.row)) is not None:
                self.failed[add.row] = error
            if table.features[add.row] & SamplingFeature.GRAMMAR_MASK:
                self._masks.add(add.row, options, add.num_prompt)
        rows, blocks, groups = take(step.block_rows, np.int32), take(step.block_ids, np.int32), step.block_groups
        (table if mirror is None else mirror).append_blocks(rows, blocks, take(groups, np.uint8))

    def _options_of(self, raw: msgspec.Raw) -> GenerationOptions:
        """Decode the options, which the sequences of a request share. They are added one after the other."""
        packed = bytes(raw)
        if packed != self._last_options[0]:
            self._last_options = packed, self._options.decode(packed)
        return self._last_options[1]

    def _take_adapter(self, row: int, adapter_id: str) -> None:
        assert self._adapters is not None, f"row {row} has an adapter, but adapters are off"
        try:
            self._table.adapters[row] = self._adapters.take(row, adapter_id)
        except (OSError, ValueError) as error:
            self.failed[row] = f"{ADAPTER_FAILED}: {error}"

    def drop_all(self) -> None:
        """Drop all rows: the scheduler has died, and its successor begins with none."""
        if self._adapters is not None:
            self._adapters.use(())
        self._drop(np.flatnonzero(self._table.taken).astype(np.int32))

    def _drop(self, rows: IntArray) -> None:
        self._table.drop(rows)
        if self._mirror is not None:
            self._mirror.drop(rows)
        self._masks.drop(rows)
        if self._drop_drafts is not None:
            self._drop_drafts(rows)
        for row in rows.tolist():
            self.failed.pop(row, None)
            self._pool.drop(row)
            if self._adapters is not None:
                self._adapters.drop(row)


def copies_of(step: Step, take: Take, facts: ExecuteFacts) -> tuple[IntArray, IntArray]:
    """Sources and targets of a step's block copies, checked; ids from the number of KV blocks on are swap blocks."""
    sources, targets = take(step.copy_sources, np.int32), take(step.copy_targets, np.int32)
    assert len(sources) == len(targets), f"{len(sources)} source blocks, {len(targets)} target blocks"
    if len(sources):
        end = facts.num_blocks + facts.num_swap_blocks
        for blocks in (sources, targets):
            assert blocks.min() >= 0 and blocks.max() < end, f"copied block ids must be below {end}: {blocks}"
        assert (sources != targets).all(), f"blocks copied to themselves: {sources[sources == targets]}"
    return sources, targets
