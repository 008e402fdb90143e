"""The running sequences as a struct of arrays, one entry per row. A step's bookkeeping is a few numpy operations;
Python touches only rows that start, end or cross a block boundary.

    ids[row]:   0 ..... num_computed_tokens ..... num_tokens ..... num_tokens + num_output_placeholders
                computed,              to compute,          sampled by steps in flight:
                or in flight           ids known            ids not known yet
"""

from bisect import bisect_left, insort

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Int32s, Int64s
from pipeline.stages.schedule.kv_cache.tables import BlockTable
from pipeline.stages.schedule.request import NO_ROW, Order, Sequence
from pipeline.stages.schedule.row_flags import RowFlag, flags_of, flags_of_all
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

NEVER_REGISTERED = np.iinfo(np.int64).max
"""`num_registered` of rows whose blocks must never be found in the prefix cache."""
NOT_KNOWN = -1


class RowTracker:
    """A table of `max_num_seqs` rows, of which `max_num_rows` are used; row r is row r of the executor."""

    def __init__(self, config: SchedulerConfig) -> None:
        max_num_seqs, max_model_len, block_size = config.max_num_seqs, config.max_model_len, config.block_size
        num_groups = len(config.kv_groups)
        self._flags_of_all = flags_of_all(config)
        self.num_tokens: Int64s = np.zeros(max_num_seqs, np.int64)
        """Settled ids, prompt and output."""
        self.num_computed_tokens: Int64s = np.zeros(max_num_seqs, np.int64)
        """Positions whose KV is computed, or will be by steps in flight."""
        self.num_computed_before: Int64s = np.zeros(max_num_seqs, np.int64)
        """`num_computed_tokens` before the current plan: the positions that the plan's copies may read."""
        self.num_output_placeholders: Int64s = np.zeros(max_num_seqs, np.int64)
        """Ids that steps in flight will sample."""
        self.sampled_by: Int64s = np.zeros(max_num_seqs, np.int64)
        """The last step that samples an id for the row; stale before its first one."""
        self.num_drafts: Int64s = np.zeros(max_num_seqs, np.int64)
        """Ids that the executor may propose in the step in flight. While there are any, the row is in no other step:
        only the result says how many positions are computed."""
        self.max_num_tokens: Int64s = np.zeros(max_num_seqs, np.int64)
        self.sent: Int64s = np.zeros(max_num_seqs, np.int64)
        self.num_prompt: Int64s = np.zeros(max_num_seqs, np.int64)
        self.num_resumed_tokens: Int64s = np.zeros(max_num_seqs, np.int64)
        self.media_ends: Int64s = np.zeros(max_num_seqs, np.int64)
        """The position behind the last one of a media item; 0 without any."""
        self.block_ends: Int64s = np.zeros((num_groups, max_num_seqs), np.int64)
        """The end of each row's block table, for each KV group."""
        self.block_firsts: Int64s = np.zeros((num_groups, max_num_seqs), np.int64)
        """The first place in the table with a block; those before were released or never needed."""
        self.num_blocks: Int64s = self.block_ends[0] if num_groups == 1 else np.zeros(max_num_seqs, np.int64)
        """Places that the tables of all groups have: the least end."""
        self.num_registered: Int64s = np.zeros(max_num_seqs, np.int64)
        """Blocks, counted from the first, that were added to the prefix cache."""
        self.num_offloaded: Int64s = np.zeros(max_num_seqs, np.int64)
        """Blocks, counted from the first, that swap space holds too (kv_cache/offload.py)."""
        self.priority_key: Int64s = np.zeros(max_num_seqs, np.int64)
        """The rank in the sequence's order."""
        self.is_long = np.zeros(max_num_seqs, np.bool_)
        """Whether the sequence started with a long prompt to compute."""
        self.seq = np.zeros(max_num_seqs, np.uint64)
        self.detokenize: Int64s = np.zeros(max_num_seqs, np.int64)
        """The replica of detokenize that gets the output."""
        self.generation = np.zeros(max_num_seqs, np.uint32)
        self.active = np.zeros(max_num_seqs, np.bool_)
        self.ids: Int32s = np.zeros((max_num_seqs, max_model_len + (not config.generates)), np.int32)
        self.tables: Int32s = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        """By KV group: the block tables, [rows, places] each."""
        self.token_output_bytes: Int64s = np.zeros(max_num_seqs, np.int64)
        """Bytes of the token output of each sampled id; 0 in rows without token outputs."""
        self.prompt_logprob_bytes: Int64s = np.zeros(max_num_seqs, np.int64)
        """Bytes of the token output of each prompt id; 0 in rows without them."""
        self.flags: Int64s = np.zeros(max_num_seqs, np.int64)
        """What the row's steps need (row_flags.py)."""
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self._free = list(range(config.max_num_rows - 1, -1, -1))
        self._by_age: list[tuple[Order, int]] = []
        self._order: Int64s | None = None
        self._all_flags = NOT_KNOWN
        self.num_changes = 0
        """How often a sequence has started in a row or left one, or the flags of one have changed."""

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def order(self) -> Int64s:
        """The active rows by sequence order; int64."""
        if self._order is None:
            self._order = np.fromiter((row for _, row in self._by_age), np.int64, len(self._by_age))
        return self._order

    @property
    def all_flags(self) -> int:
        """The flags that any row has, as one word."""
        if self._all_flags == NOT_KNOWN:
            self._all_flags = int(np.bitwise_or.reduce(self.flags[self.order]))
        return self._all_flags

    def have(self, flag: RowFlag, rows: Int64s) -> Bools:
        """Which of these rows have a flag."""
        having: Bools = (self.flags[rows] & flag) != 0
        return having

    def start(
        self,
        sequence: Sequence,
        tables: list[BlockTable],
        num_computed: int,
        num_registered: int,
        long_prompt_tokens: int,
    ) -> int:
        """Move a sequence into a row and return the row. The KV of its first `num_computed` positions is in the blocks
        of its `tables`, one for each KV group; the blocks at the first `num_registered` places are in the prefix cache
        already. The sequence is long if it has more than `long_prompt_tokens` to compute."""
        row = self._free.pop()
        num_tokens = len(sequence.ids)
        self.num_tokens[row] = num_tokens
        self.num_computed_tokens[row] = num_computed
        self.num_computed_before[row] = 0
        self.priority_key[row] = sequence.order[0]
        self.is_long[row] = num_tokens - num_computed > long_prompt_tokens
        self.num_output_placeholders[row] = 0
        self.num_drafts[row] = 0
        self.max_num_tokens[row] = sequence.max_num_tokens
        self.flags[row] = flags = flags_of(sequence, self._flags_of_all)
        # The output buffer has the ids of waiting sequences. Beams send nothing before the search is over.
        self.sent[row] = sequence.max_num_tokens if flags & RowFlag.BEAM else num_tokens
        self.num_prompt[row] = len(sequence.request.prompt)
        self.media_ends[row] = 0 if sequence.request.media is None else sequence.request.media.end
        self.num_resumed_tokens[row] = sequence.num_resumed_tokens
        for group, table in enumerate(tables):
            self.block_firsts[group, row], self.block_ends[group, row] = table.first, table.end
            self.tables[group, row, table.first : table.end] = table.blocks
        self.num_blocks[row] = min(table.end for table in tables)
        self.num_registered[row] = num_registered
        self.num_offloaded[row] = 0
        self.seq[row] = sequence.seq
        self.detokenize[row] = sequence.detokenize
        self.generation[row] += 1
        self.active[row] = True
        self.ids[row, :num_tokens] = sequence.ids
        self.token_output_bytes[row] = sequence.request.row_token_output_bytes
        self.prompt_logprob_bytes[row] = sequence.prompt_logprob_bytes
        self.sequences[row] = sequence
        sequence.row = row
        sequence.ids = sequence.ids[:0]
        insort(self._by_age, (sequence.order, row))
        self._order, self._all_flags = None, NOT_KNOWN
        self.num_changes += 1
        return row

    def end(self, row: int) -> tuple[Sequence, list[int]]:
        """Move a sequence out of its row. Returns it and its blocks, the tail first."""
        sequence = self.sequences[row]
        assert sequence is not None and self.active[row], f"row {row} is not running"
        sequence.ids = self.ids[row, : self.num_tokens[row]].copy()
        sequence.row = NO_ROW
        blocks = self.blocks_of(row)
        blocks.reverse()
        self.sequences[row] = None
        self.active[row] = False
        del self._by_age[bisect_left(self._by_age, (sequence.order, row))]
        if self._order is not None:
            self._order = self._order[self._order != row]
        self._all_flags = NOT_KNOWN
        self.num_changes += 1
        self._free.append(row)
        return sequence, blocks

    def set_flag(self, row: int, flag: RowFlag, *, is_set: bool) -> None:
        """What a row's steps need has changed: plans that don't look at it end."""
        self.flags[row] = int(self.flags[row]) | flag if is_set else int(self.flags[row]) & ~flag
        self._all_flags = NOT_KNOWN
        self.num_changes += 1

    def blocks_of(self, row: int) -> list[int]:
        """A row's blocks, of one KV group after the other, the head first."""
        blocks: list[int] = []
        for group, table in enumerate(self.tables):
            blocks += table[row, self.block_firsts[group, row] : self.block_ends[group, row]].tolist()
        return blocks

    def append_block(self, group: int, row: int, block: int) -> None:
        """Append a block to the table of a KV group. The caller sets `num_blocks` if there are several groups."""
        index = self.block_ends[group, row]
        self.tables[group, row, index] = block
        self.block_ends[group, row] = index + 1
