"""The row table: the executor's state of each running sequence, as arrays over all rows.

    free ──add──► live ──stop id──► ended ──drop──► free
                    └────────drop──────────────────►┘

Only the scheduler adds and drops rows. The executor ends a row when it samples a stop id. Steps that were planned
before then compute nothing for the row.

Shapes: R max_num_seqs, L max_model_len, B blocks of the longest row, G KV groups.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.kernels.sampling.logits_processor_inputs import LOGITS_PROCESSORS, NO_IDS, LogitsProcessors
from pipeline.kernels.sampling.logprob_inputs import NO_LOGPROBS
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key
from pipeline.kernels.sampling.sampling_inputs import GREEDY_BELOW, SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray
from pipeline.runtime.messages import Finish, GenerationOptions, Pooling, RowAdd
from pipeline.shm.arrays import Array
from pipeline.stages.execute.sampling_features import NOT_GREEDY, SamplingFeature, logits_processors_of, single

Take = Callable[[Array, Any], "np.ndarray[Any, Any]"]
"""Takes an array out of a message: (array, dtype) → one-dimensional, perhaps read-only."""

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
GroupArray = np.ndarray[Any, np.dtype[np.uint8]]

NOT_YET = -1
"""`num_computed` of a new row: it may start after a cached prefix of any length."""

DROPPED = -2
"""`num_computed` of a row that was dropped: no step can continue from there."""


class RowTable:
    """Owned by the runner. The methods assert that the scheduler's plan is valid."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, num_blocks: int, vocab_size: int, num_groups: int = 1
    ) -> None:
        self.max_model_len = max_model_len
        self._pool_size = num_blocks
        self.vocab_size = vocab_size
        max_num_blocks = -(-max_model_len // BLOCK_SIZE)
        self.ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        """[R, L]; the first `num_ids` of each row are known"""
        self.num_ids: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_computed: IntArray = np.full(max_num_seqs, NOT_YET, np.int32)
        """Tokens whose KV is written, or was when the row was added."""
        self.group_blocks: IntArray = np.zeros((num_groups, max_num_seqs, max_num_blocks), np.int32)
        """[G, R, B]; the first `block_ends` of each row are valid, as far as they are in the group's window"""
        self.blocks: IntArray = self.group_blocks[0]
        """[R, B]; the first group's"""
        self.block_ends: IntArray = np.zeros((num_groups, max_num_seqs), np.int32)
        self.num_blocks: IntArray = self.block_ends[0] if num_groups == 1 else np.zeros(max_num_seqs, np.int32)
        """The least of the groups' `block_ends`."""
        self.generations: np.ndarray[Any, np.dtype[np.uint32]] = np.zeros(max_num_seqs, np.uint32)
        self.taken: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(max_num_seqs, np.bool_)
        self.ended: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(max_num_seqs, np.bool_)
        self.temperature: np.ndarray[Any, np.dtype[np.float32]] = np.zeros(max_num_seqs, np.float32)
        self.top_p: np.ndarray[Any, np.dtype[np.float32]] = np.ones(max_num_seqs, np.float32)
        self.min_p: np.ndarray[Any, np.dtype[np.float32]] = np.zeros(max_num_seqs, np.float32)
        self.top_k: IntArray = np.zeros(max_num_seqs, np.int32)
        self.keys: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros(max_num_seqs, np.uint64)
        """Noise keys, see kernels/sampling/noise_keys.py."""
        self.stops: list[frozenset[int]] = [frozenset()] * max_num_seqs
        self.features: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(max_num_seqs, np.uint8)
        """`SamplingFeature`; 0 for rows that are not taken"""
        self.requested_features = 0
        """The union of `features`."""
        self.num_prompt: IntArray = np.zeros(max_num_seqs, np.int32)
        self.num_logprobs: IntArray = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        """Number of top logprobs for each id."""
        self.num_prompt_logprobs: IntArray = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self.logprob_token_ids: list[IntArray] = [NO_IDS] * max_num_seqs
        """The ids in a row's token outputs instead of the likeliest ones; empty for the likeliest."""
        self._logprob_id_addresses: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros(max_num_seqs, np.uint64)
        """Addresses of these ids; 0 for none."""
        self.adapters: IntArray = np.full(max_num_seqs, -1, np.int32)
        """The slot of each row's LoRA adapter, or -1. Stale for rows that are not taken."""
        self.segment_starts: IntArray = np.zeros(max_num_seqs, np.int32)
        """`GenerationOptions.segment_start`"""
        self.pooling: list[Pooling] = [Pooling.NONE] * max_num_seqs
        self.predicted: list[IntArray] = [NO_IDS] * max_num_seqs
        """Ids that the client expects in a row's output; only proposals are made of them."""
        self.logits_processors: list[LogitsProcessors | None] = [None] * max_num_seqs
        self._last_processors: tuple[GenerationOptions | None, LogitsProcessors | None] = None, None
        """Those of the last row that was added, by its options, which the sequences of a request share: lists of ten
        thousands of ids are converted once."""
        self._native_logits_processors = np.zeros(max_num_seqs, LOGITS_PROCESSORS)
        bases = (
            self._native_logits_processors.ctypes.data
            + np.arange(max_num_seqs, dtype=np.uint64) * LOGITS_PROCESSORS.itemsize
        )
        self._logits_processor_addresses: np.ndarray[Any, np.dtype[np.uint64]] = bases.astype(np.uint64)

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.taken & ~self.ended))

    def drop(self, rows: IntArray) -> None:
        if not len(rows):
            return
        assert self.taken[rows].all(), f"rows dropped that are not taken: {rows[~self.taken[rows]]}"
        assert len(set(rows.tolist())) == len(rows), f"rows dropped twice: {rows}"
        self.taken[rows] = False
        self.num_computed[rows] = DROPPED
        if self.features[rows].any():
            for row in rows.tolist():
                self.logits_processors[row] = None
            self.features[rows] = 0
            self.requested_features = int(np.bitwise_or.reduce(self.features))

    def add(
        self,
        row: int,
        generation: int,
        index: int,
        ids: IntArray,
        blocks: IntArray,
        options: GenerationOptions,
        eos_ids: Collection[int],
        fork_of: int = -1,
        num_prompt: int = 0,
        other_blocks: Sequence[IntArray] = (),
        first_blocks: Sequence[int] = (),
    ) -> None:
        """Add a sequence with these known ids. If it is a fork, the first `num_prompt` ids of row `fork_of` precede
        them. `other_blocks` are the block tables of the KV groups after the first; `first_blocks` are the places of the
        first block in each, by default 0."""
        assert not self.taken[row], f"row {row} is taken already"
        if fork_of >= 0:
            ids = np.concatenate((self._prompt_of(fork_of, num_prompt), ids))
        assert 0 < len(ids) <= self.max_model_len, f"{len(ids)} ids for row {row}, at most {self.max_model_len}"
        assert ids.min() >= 0 and ids.max() < self.vocab_size, f"row {row} has ids outside the vocabulary"
        self.taken[row], self.ended[row] = True, False
        self.generations[row] = generation
        self.ids[row, : len(ids)] = ids
        self.num_ids[row] = len(ids)
        self.num_computed[row] = NOT_YET
        tables = [blocks, *other_blocks]
        assert len(tables) == len(self.group_blocks), f"row {row} has {len(tables)} block tables"
        for group, table in enumerate(tables):
            first = first_blocks[group] if len(first_blocks) else 0
            self.group_blocks[group, row, :first] = 0
            self.block_ends[group, row] = first
            self.append_blocks(np.full(len(table), row, np.int32), table, np.full(len(table), group, np.uint8))
        self.num_blocks[row] = self.block_ends[:, row].min()
        self.num_prompt[row] = num_prompt
        self.adapters[row] = -1
        self._set_sampling(row, index, options, eos_ids)

    def take_in(self, add: RowAdd, options: GenerationOptions, eos_ids: Collection[int], take: Take) -> None:
        """Add a row from a step's message. `options` are the message's, decoded."""
        ids, blocks, *others = (take(array, np.int32) for array in (add.ids, add.blocks, *add.group_blocks))
        of_fork = add.fork_of, add.num_prompt
        self.add(
            *(add.row, add.generation, add.index, ids, blocks, options, eos_ids, *of_fork, others, add.first_blocks)
        )

    def types_of(self, rows: IntArray, positions: IntArray) -> IntArray:
        """The token types of positions of rows."""
        starts = self.segment_starts[rows]
        types: IntArray = ((starts > 0) & (positions >= starts)).astype(np.int32)
        return types

    def _set_sampling(self, row: int, index: int, options: GenerationOptions, eos_ids: Collection[int]) -> None:
        self.temperature[row] = single(options.temperature)
        self.top_p[row] = options.top_p
        self.min_p[row] = options.min_p
        self.top_k[row] = min(options.top_k, self.vocab_size)
        self.keys[row] = sequence_key(options.seed, index)
        self.stops[row] = frozenset(options.stop_token_ids).union(
            # A grammar allows EOS only where the output may end and, if EOS is ignored, only where it must.
            () if options.ignore_eos and not options.compiled_grammar else eos_ids
        )
        self.predicted[row] = np.frombuffer(options.predicted_ids, np.int32)
        self.num_logprobs[row] = options.num_logprobs
        self.logprob_token_ids[row] = given = np.array(options.logprob_token_ids, np.int32)
        if len(given):
            assert len(given) == options.num_logprobs, (
                f"row {row} has {len(given)} ids for token outputs of another size"
            )
            assert given.min() >= 0 and given.max() < self.vocab_size, f"row {row} has ids outside the vocabulary"
        self._logprob_id_addresses[row] = given.ctypes.data if len(given) else 0
        # Only the first sequence of a request returns prompt logprobs.
        self.num_prompt_logprobs[row] = options.num_prompt_logprobs if index == 0 else NO_LOGPROBS
        self.pooling[row] = Pooling(options.pooling)
        self.segment_starts[row] = options.segment_start
        self.features[row] = features = self._set_features(row, options, eos_ids)
        self.requested_features |= features

    def _set_features(self, row: int, options: GenerationOptions, eos_ids: Collection[int]) -> int:
        features = SamplingFeature.PROMPT_LOGPROBS if self.num_prompt_logprobs[row] >= 0 else 0
        if self.pooling[row]:
            # No id is sampled for it, so it has no stop ids.
            self.stops[row] = frozenset()
            return features | SamplingFeature.EMBEDDING
        ids, num_prompt = self.ids[row], int(self.num_prompt[row])
        if self._last_processors[0] is not options:
            made = logits_processors_of(options, ids, num_prompt, eos_ids, self.vocab_size)
            self._last_processors = options, made
        if (logits_processors := self._last_processors[1]) is not None:
            logits_processors = replace(logits_processors, ids=ids, num_prompt=num_prompt)
            self.logits_processors[row] = logits_processors
            logits_processors.write(self._native_logits_processors, row)
            features |= SamplingFeature.LOGITS_PROCESSORS
        if self.temperature[row] >= GREEDY_BELOW:
            features |= SamplingFeature.RANDOM
        if options.has_masks:
            features |= SamplingFeature.GRAMMAR_MASK
        if self.num_logprobs[row] >= 0:
            features |= SamplingFeature.LOGPROBS
        return features

    def _prompt_of(self, row: int, num_prompt: int) -> IntArray:
        assert row < len(self.taken) and self.taken[row], f"fork of row {row}, which is not taken"
        known = int(self.num_ids[row])
        assert 0 < num_prompt <= known, f"fork of {num_prompt} ids of row {row}, which has {known}"
        return self.ids[row, :num_prompt]

    def append_blocks(self, rows: IntArray, blocks: IntArray, groups: GroupArray) -> list[int]:
        """Append blocks to rows; parallel arrays, blocks of one row in order. `groups` are their KV groups; empty for
        the first. Returns the index of each in its row's table."""
        if not len(rows):
            return []
        assert self.taken[rows].all(), "blocks for a row that is not taken"
        assert blocks.min() >= 0 and blocks.max() < self._pool_size, "blocks outside the KV memory"
        indices = []
        groups = groups if len(groups) else np.zeros(len(rows), np.uint8)
        for row, block, group in zip(rows.tolist(), blocks.tolist(), groups.tolist(), strict=True):
            indices.append(index := int(self.block_ends[group, row]))
            self.group_blocks[group, row, index] = block
            self.block_ends[group, row] = index + 1
        if len(self.block_ends) > 1:
            self.num_blocks[rows] = self.block_ends[:, rows].min(axis=0)
        return indices

    def begin(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> None:
        """Check the entries of a step against their rows, and mark their tokens as computed. No row may have ended."""
        ends, known = starts + counts, self.num_ids[rows]
        # Cheap checks for every step; the ones with messages only run if these fail. Viewed as unsigned, negative
        # numbers are too large.
        fine = (self.num_computed[rows] == starts) & (starts.view(np.uint32) < ends.view(np.uint32))
        fine &= ends <= self.num_blocks[rows] * BLOCK_SIZE
        fine &= (ends == known) | (~samples & (ends < known))
        fine &= ends <= self.max_model_len - samples
        if np.count_nonzero(fine) < len(rows) or len(set(rows.tolist())) < len(rows):
            self._check(rows, starts, counts, samples, ends)
        self.num_computed[rows] = ends

    def _check(self, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray, ends: IntArray) -> None:
        """Assert that entries are valid, one by one. They are if a row is new."""
        assert len(set(rows.tolist())) == len(rows), f"a row is computed twice in one step: {rows}"
        assert self.taken[rows].all(), f"rows computed that are not taken: {rows[~self.taken[rows]]}"
        assert (counts > 0).all(), f"an entry computes nothing: {counts}"
        assert (starts >= 0).all(), f"an entry starts before its row: {starts}"
        expected = self.num_computed[rows]
        wrong = (expected != NOT_YET) & (expected != starts)
        assert not wrong.any(), f"rows {rows[wrong]} start at {starts[wrong]}, computed are {expected[wrong]}"
        assert (ends <= self.num_ids[rows]).all(), "tokens computed before they are known"
        assert (ends <= self.num_blocks[rows] * BLOCK_SIZE).all(), "tokens computed without a block for them"
        last = ends[samples]
        assert (last == self.num_ids[rows[samples]]).all(), "sampled before the last known token is computed"
        assert (last < self.max_model_len).all(), "sampled beyond max_model_len"

    def fill_sampling_inputs(
        self, sampling_inputs: SamplingInputs, rows: IntArray, num_known: IntArray | None = None
    ) -> None:
        """Write the sampling parameters of `rows`, for the id after the first `num_known` ids of each; by default after
        all that are known. A row may come several times.

        The noise depends only on the sequence's key and the id's position, not on the step or the batch.
        """
        num, requested_features = len(rows), self.requested_features
        sampling_inputs.rows, sampling_inputs.row_logits_processors = rows, self.logits_processors
        if not (requested_features & NOT_GREEDY or sampling_inputs.keeps_logits):
            sampling_inputs.greedy[:num] = 1
            sampling_inputs.unmask(num)
            sampling_inputs.logprobs.clear(num)
            return
        num_known = self.num_ids[rows] if num_known is None else num_known
        features = self.features[rows]
        sampling_inputs.greedy[:num] = 0 if sampling_inputs.keeps_logits else features & NOT_GREEDY == 0
        sampling_inputs.temperature[:num] = self.temperature[rows]
        if requested_features & SamplingFeature.RANDOM:
            sampling_inputs.top_k[:num] = self.top_k[rows]
            sampling_inputs.top_p[:num] = self.top_p[rows]
            sampling_inputs.min_p[:num] = self.min_p[rows]
            sampling_inputs.keys[:num] = noise_keys(self.keys[rows], num_known)
        if requested_features & SamplingFeature.LOGITS_PROCESSORS:
            sampling_inputs.logits_processors[:num] = np.where(
                features & SamplingFeature.LOGITS_PROCESSORS, self._logits_processor_addresses[rows], np.uint64(0)
            )
            sampling_inputs.num_known[:num] = num_known
        else:
            sampling_inputs.logits_processors[:num] = 0
        if requested_features & SamplingFeature.GRAMMAR_MASK:
            sampling_inputs.mask(features & SamplingFeature.GRAMMAR_MASK != 0)
        else:
            sampling_inputs.unmask(num)
        if requested_features & SamplingFeature.LOGPROBS:
            sampling_inputs.logprobs.lay_out(self.num_logprobs[rows], self._logprob_id_addresses[rows])
        else:
            sampling_inputs.logprobs.clear(num)

    def end(self, row: int) -> None:
        """End a row for which no id can be sampled."""
        self.ended[row] = True

    def append_ids(self, rows: IntArray, ids: IntArray) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Append sampled ids, and end the rows that they stop. Returns a `Finish` for each, uint8."""
        known = self.num_ids[rows]
        self.ids[rows, known] = ids
        self.num_ids[rows] = known + 1
        stops = self.stops
        stopped = [token in stops[row] for row, token in zip(rows.tolist(), ids.tolist(), strict=True)]
        if True not in stopped:
            return np.zeros(len(stopped), np.uint8)
        self.ended[rows] = stopped
        return np.where(stopped, Finish.STOP, Finish.NONE).astype(np.uint8)
