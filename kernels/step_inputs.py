"""The inputs of one step for the kernels.

All arrays are allocated once and keep their addresses, which recorded programs contain. A step fills their beginnings
and sets the three counts.

Shapes: T max_num_tokens, R max_num_rows, B blocks of the longest row, G KV groups.
"""

from typing import Any

import numpy as np

from pipeline.kernels.step_angles import StepAngles

IntArray = np.ndarray[Any, np.dtype[np.int32]]
LongArray = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_SIZE = 16
"""Tokens in one KV block."""


KV_SCALE_BYTES = 2
"""Of keys and values in 8 bits, each token and head has a bfloat16 scale for its keys and one for its values."""


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int) -> int:
    """Bytes that the keys and values of one block take, over all layers, with numbers of `item_bytes`. Numbers of one
    byte have scales."""
    scale_bytes = KV_SCALE_BYTES if item_bytes == 1 else 0
    return 2 * num_layers * BLOCK_SIZE * num_kv_heads * (head_dim * item_bytes + scale_bytes)


class StepInputs:
    """The inputs of one step at a time. Entry i computes tokens `offsets[i] .. offsets[i] + counts[i]` of the batch,
    which are positions `starts[i] .. starts[i] + counts[i]` of its row."""

    def __init__(
        self,
        max_num_tokens: int,
        max_num_rows: int,
        max_num_blocks: int,
        num_groups: int = 1,
        max_num_samples: int | None = None,
        is_causal: bool = True,
        has_spans: bool = False,
        angles: StepAngles | None = None,
        *,
        type_rows: int | None = None,
    ) -> None:
        """By default there is one sample for each row at most. Unless attention `is_causal`, there are `key_ends`,
        and if there are spans whose tokens see all of it. `type_rows` is as in `ModelConfig.type_rows`. `angles` are
        those of every rotary embedding of the model; None: positions say how far tokens turn."""
        self.max_num_tokens = max_num_tokens
        self.max_num_rows = max_num_rows
        self.max_num_samples = max_num_rows if max_num_samples is None else max_num_samples
        self.num_tokens = 0
        self.num_rows = 0
        self.num_samples = 0
        self.row_count: IntArray = np.zeros(1, np.int32)
        """[1]; `num_rows`, for programs."""
        self.windows: StepInputs | None = None
        """The same tokens as other entries, for layers whose tokens see only these."""
        self.starts: IntArray = np.zeros(max_num_rows, np.int32)
        self.counts: IntArray = np.zeros(max_num_rows, np.int32)
        self.offsets: IntArray = np.zeros(max_num_rows, np.int32)
        self.group_tables: IntArray = np.zeros((num_groups, max_num_rows, max_num_blocks), np.int32)
        """[G, R, B]; entries after a row's own blocks are stale, and so are those before its window."""
        self.block_tables: IntArray = self.group_tables[0]
        """[R, B]; the first group's"""
        self.ids: LongArray = np.zeros(max_num_tokens, np.int64)
        """[T]"""
        self.positions: LongArray = np.zeros(max_num_tokens, np.int64)
        """[T]; each token's place in its row"""
        self.angles = angles
        self.angle_rows: LongArray = self.positions if angles is None else angles.rows
        """[T]; each token's row in tables of angles."""
        self._type_rows = type_rows
        self.position_rows: LongArray = self.positions if type_rows is None else np.zeros(max_num_tokens, np.int64)
        """[T]; each token's row in the table of learned positions and token types. Without such types, `positions`."""
        self.group_slots: LongArray = np.zeros((num_groups, max_num_tokens), np.int64)
        """[G, T]; where a token's keys and values go: block x BLOCK_SIZE + place in the block"""
        self.slots: LongArray = self.group_slots[0]
        """[T]; the first group's"""
        self.sampled: LongArray = np.zeros(self.max_num_samples, np.int64)
        """[max_num_samples]; the tokens whose logits are wanted"""
        self._is_causal = is_causal
        self.key_ends: IntArray | None = np.zeros(max_num_tokens, np.int32) if has_spans or not is_causal else None
        """[T]; the first key that each token does not see, at least 1 and after the first key of its window. None: its
        position + 1. Keys before it must be in the cache when attention is computed, also those of later tokens."""
        self.adapters: IntArray = np.full(max_num_tokens, -1, np.int32)
        """[T]; the slot of each token's adapter, or -1. Only valid if `num_adapted` is not 0."""
        self.num_adapted: IntArray = np.zeros(1, np.int32)
        """[1]; how many of the step's tokens have an adapter."""
        self.state_reads: IntArray = np.full(max_num_rows, -1, np.int32)
        """[R]; the slot with the state that each entry continues, or -1 if it has none. Only of models with state."""
        self.state_writes: IntArray = np.zeros(max_num_rows, np.int32)
        """[R]; the slot for the state behind each entry. No other entry of the step reads or writes it."""
        self._arange: IntArray = np.arange(max_num_rows, dtype=np.int32)

    def add_windows(self, max_num_rows: int, max_num_blocks: int) -> "StepInputs":
        """Make `windows`, whose `fill` is to be called behind the one of these inputs in each step."""
        self.windows = StepInputs(self.max_num_tokens, max_num_rows, max_num_blocks, 1, 1, is_causal=False)
        self.windows.angle_rows = self.angle_rows
        return self.windows

    def fill_adapters(self, slots: IntArray) -> None:
        """Set the adapters of the next step: a slot or -1 for each of its entries. Call it after `fill`."""
        counts = self.counts[: self.num_rows]
        of_tokens = slots if self.num_tokens == self.num_rows else np.repeat(slots, counts)
        self.adapters[: self.num_tokens] = of_tokens
        self.num_adapted[0] = np.count_nonzero(of_tokens >= 0)

    def fill_types(self, types: IntArray | int) -> None:
        """Set the token types of the next step, one for each of its tokens. Call it after `fill`."""
        assert self._type_rows is not None
        positions = self.positions[: self.num_tokens] if self._type_rows else 0
        self.position_rows[: self.num_tokens] = positions + np.multiply(types, self._type_rows or 1)

    def fill(
        self,
        ids: IntArray,
        starts: IntArray,
        counts: IntArray,
        block_tables: IntArray,
        samples: "np.ndarray[Any, Any]",
        other_tables: "tuple[IntArray, ...] | list[IntArray]" = (),
        key_ends: IntArray | None = None,
        coordinates: LongArray | None = None,
    ) -> None:
        """Set the next step.

        `ids` are those of all entries, one after the other; `starts`, `counts` and `samples` (of how many of the
        entry's last tokens logits are wanted) have one value an entry, and `block_tables` [entries, blocks] holds at
        least the blocks that each entry writes or reads, `other_tables` those of the KV groups after the first.
        `key_ends` are those of all tokens, if there are any; by default a token sees what is before it if attention is
        causal, else its whole entry. `coordinates` [C, tokens] are what tokens turn by if there are `angles`; by
        default all are the position.
        """
        num_rows, num_tokens = len(starts), len(ids)
        assert num_rows <= self.max_num_rows, f"{num_rows} entries in a step, {self.max_num_rows} at most"
        assert num_tokens <= self.max_num_tokens, f"{num_tokens} tokens in a step, {self.max_num_tokens} at most"
        assert np.add.reduce(counts) == num_tokens
        entry: np.ndarray[Any, Any]
        if num_tokens == num_rows:  # one token each, in most steps
            offsets = last = entry = self._arange[:num_rows]
            positions = starts
        else:
            ends = np.cumsum(counts, dtype=np.int32)
            offsets, last = ends - counts, ends - 1
            entry = np.repeat(np.arange(num_rows), counts)
            positions = np.arange(num_tokens) - offsets[entry] + starts[entry]
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.row_count[0] = num_rows
        self.starts[:num_rows] = starts
        self.counts[:num_rows] = counts
        self.offsets[:num_rows] = offsets
        self.block_tables[:num_rows, : block_tables.shape[1]] = block_tables
        self.ids[:num_tokens] = ids
        self.positions[:num_tokens] = positions
        if self.angles is not None:
            self.angles.fill(positions if coordinates is None else coordinates)
        if self.key_ends is not None:
            if key_ends is None:
                key_ends = positions + 1 if self._is_causal else (starts + counts)[entry]
            self.key_ends[:num_tokens] = key_ends
        block_indices, offset = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        blocks = block_tables[entry, block_indices]
        self.slots[:num_tokens] = blocks.astype(np.int64) * BLOCK_SIZE + offset
        for group, table in enumerate(other_tables, 1):
            self.group_tables[group, :num_rows, : table.shape[1]] = table
            self.group_slots[group, :num_tokens] = table[entry, block_indices].astype(np.int64) * BLOCK_SIZE + offset
        sampled = last[samples.astype(bool, copy=False)]
        if samples.dtype != np.bool_ and len(samples) and samples.max() > 1:
            num_each = samples[samples > 0]
            behind = np.arange(int(num_each.sum())) - np.repeat(num_each.cumsum() - 1, num_each)
            sampled = np.repeat(sampled, num_each) + behind
        self.num_samples = len(sampled)
        assert self.num_samples <= self.max_num_samples
        self.sampled[: self.num_samples] = sampled
