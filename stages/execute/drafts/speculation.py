"""Speculative decoding: proposers of ids, and which of the proposed ids are kept.

    known          the row's ids, the last one not computed yet
    proposed       d1 … dk, by a `Proposer`
    sampled        s0 … sk, by the model after known, known d1, …, known d1 … dk, each with the noise of its position
    kept           s0 … sa, if d1 … da are s0 … s(a-1) and d(a+1) is not s(a)

Each id that is kept is sampled after the ids that precede it in the text, with the noise key of its position, its
penalties and its mask. So the text is the same as without proposals, at any temperature, and proposals may come from
anywhere (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023, sample in
another way, which keeps the distribution and not the text).
"""

from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.config.sections.speculative import SpeculativeSettings
from pipeline.kernels.sampling.logprob_inputs import ByteArray, FloatArray
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, LongArray
from pipeline.stages.execute.grammar_masks.masks import Masks
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature

ID_BYTES = 4


class Proposer(Protocol):
    """Proposes ids that may follow a row's ids. The ids of rows are in the row table."""

    reads_hidden_states: bool
    """Whether it has to see the model's hidden states."""
    draft_s: float
    """Time of a draft model's last proposals."""
    pass_s: float
    """Mean time of its passes with one position for each row; 0 if there was none."""

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        """Up to `most` ids for each of these rows, in order. Whatever is proposed, the text is the same."""

    def observe(
        self, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray, residual: FloatArray
    ) -> None:
        """The last step's hidden states before the last norm, float32 [tokens, hidden_size]: those of positions
        `starts` … `starts` + `counts` of these rows begin at `offsets`. Only with `reads_hidden_states`."""

    def drop(self, rows: IntArray) -> None:
        """Forget what is kept for these rows: they are dropped."""

    def close(self) -> None:
        """Free threads and memory."""


class NgramProposer:
    """Prompt lookup (Saxena, 2023): finds the row's last ids earlier in the row, and proposes what followed them.

    Longer matches win, of equally long ones the last. A match that overlaps the end goes on repeating: after
    a b c a b c, it proposes a b c a b c … .
    """

    reads_hidden_states = False

    def __init__(self, table: RowTable, fewest: int, most: int) -> None:
        """`fewest` and `most` are numbers of ids to look for."""
        self._table = table
        self._fewest, self._most = fewest, most
        self.draft_s = self.pass_s = 0.0

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        table = self._table
        return [
            self._of(table.predicted[row], table.ids[row, : table.num_ids[row]], num)
            for row, num in zip(rows.tolist(), most.tolist(), strict=True)
        ]

    def observe(
        self, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray, residual: FloatArray
    ) -> None:
        pass

    def drop(self, rows: IntArray) -> None:
        pass

    def close(self) -> None:
        pass

    def _of(self, predicted: IntArray, known: IntArray, num: int) -> IntArray:
        """`predicted` are ids that the client expects; they are searched after the row's own."""
        for ids in (known, predicted) if len(predicted) else (known,):
            data = ids.tobytes()
            for length in range(min(self._most, len(known) - 1), self._fewest - 1, -1):
                # Only what has a following id is searched.
                end = len(data) - ID_BYTES
                index = _rfind(data, known[-length:].tobytes(), end)
                if index >= 0:
                    return _following(ids, index + length, num, repeats=ids is known)
        return known[:0]


def _rfind(data: bytes, pattern: bytes, end: int) -> int:
    """The index of the last occurrence of int32 numbers before byte `end`, or -1."""
    while (at := data.rfind(pattern, 0, end)) >= 0:
        if at % ID_BYTES == 0:
            return at // ID_BYTES
        end = at + len(pattern) - 1
    return -1


def _following(ids: IntArray, begin: int, num: int, *, repeats: bool) -> IntArray:
    """The `num` ids from `begin` on. If there are fewer, they repeat, or are fewer."""
    following = ids[begin : begin + num]
    return np.resize(following, num) if repeats and len(following) < num else following


class Verified(NamedTuple):
    """What is kept of a step's samples: parallel arrays, one value for each entry that samples."""

    last_ids: IntArray
    """The last id of each entry that is kept; `NO_ID` if none can be sampled."""
    num_ids: LongArray
    """Ids that are kept."""
    num_drafts: LongArray
    """Ids that were proposed."""
    accepted: IntArray
    """The ids that are kept before the last ones, of all entries, one after the other."""
    token_outputs: ByteArray
    """Token outputs of all that is kept."""
    token_output_sizes: LongArray
    """Bytes of these for each entry; empty if no row has any."""


class Speculator:
    """Lets a proposer propose ids for a step, and verifies them. Owned by the runner."""

    def __init__(
        self,
        table: RowTable,
        settings: SpeculativeSettings,
        proposer: Proposer | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`masks` knows the ids that grammars force: they are proposed first."""
        self._table, self._masks = table, masks
        self.proposer: Proposer = proposer or NgramProposer(
            table, settings.prompt_lookup_min, settings.prompt_lookup_max
        )

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> LongArray:
        """Propose up to `most` ids for each of these rows, and write them behind the rows' ids. Returns how many."""
        table = self._table
        num_drafts = np.zeros(len(rows), np.int64)
        proposed: dict[int, IntArray] = {}
        if self._masks is not None and table.requested_features & SamplingFeature.GRAMMAR_MASK:
            for index in np.flatnonzero(
                (most > 0) & (table.features[rows] & SamplingFeature.GRAMMAR_MASK != 0)
            ).tolist():
                row = int(rows[index])
                forced = self._masks.forced(row, table.ids[row, : table.num_ids[row]])
                if len(forced):
                    proposed[index] = forced[: most[index]]
        indices = np.array([index for index in np.flatnonzero(most).tolist() if index not in proposed], np.int64)
        if len(indices):
            proposals = self.proposer.propose(rows[indices], most[indices], clock)
            proposed |= zip(indices.tolist(), proposals, strict=True)
        for index, ids in proposed.items():
            row = int(rows[index])
            known = int(table.num_ids[row])
            is_outside = (ids < 0) | (ids >= table.vocab_size)
            if is_outside.any():  # a tokenizer may have more ids than the model
                ids = ids[: int(is_outside.argmax())]
            num_drafts[index] = num = len(ids)
            assert num <= most[index] and known + num < table.max_model_len
            assert known + num <= table.num_blocks[row] * BLOCK_SIZE, f"row {row} has no blocks for {num} proposed ids"
            table.ids[row, known : known + num] = ids
        return num_drafts

    def verify(
        self,
        rows: IntArray,
        num_drafts: LongArray,
        ids: IntArray,
        token_outputs: ByteArray,
        token_output_sizes: LongArray,
        failed: Container[int] = (),
    ) -> Verified:
        """Keep what equals the proposals, and one id more. `rows` and `num_drafts` are of the entries that sample;
        `ids`, `token_outputs` and `token_output_sizes` have one value for each sample. Accepted ids are appended to
        their rows; the last ones are not. Nothing is accepted for rows that have `failed`."""
        table = self._table
        begins = (1 + num_drafts).cumsum() - (1 + num_drafts)
        num_ids: LongArray = np.ones(len(rows), np.int64)
        for index in np.flatnonzero(num_drafts).tolist():
            row, begin, num = int(rows[index]), int(begins[index]), int(num_drafts[index])
            known = int(table.num_ids[row])
            if row in failed:
                continue
            sampled = ids[begin : begin + num + 1]
            wrong = np.flatnonzero(sampled[:num] != table.ids[row, known : known + num])
            num_kept = 1 + (int(wrong[0]) if len(wrong) else num)
            if stops := table.stops[row]:
                for at, token in enumerate(sampled[:num_kept].tolist()):
                    if token in stops:
                        num_kept = at + 1
                        break
            if num_kept > 1 and sampled[num_kept - 1] == NO_ID:
                num_kept -= 1  # the next step finds it again
            num_ids[index] = num_kept
        ends = begins + num_ids
        table.num_ids[rows] += (num_ids - 1).astype(np.int32)
        table.num_computed[rows] += (num_ids - 1).astype(np.int32)
        entry = np.repeat(np.arange(len(rows)), 1 + num_drafts)
        indices = np.arange(len(ids))
        is_kept: BoolArray = indices < ends[entry]
        is_last: BoolArray = indices == ends[entry] - 1
        if len(token_output_sizes):
            token_outputs = token_outputs[np.repeat(is_kept, token_output_sizes)]
            token_output_sizes = np.bincount(entry, np.where(is_kept, token_output_sizes, 0), len(rows)).astype(
                np.int64
            )
        return Verified(ids[is_last], num_ids, num_drafts, ids[is_kept & ~is_last], token_outputs, token_output_sizes)


def merged(last_ids: IntArray, num_ids: LongArray, accepted: IntArray) -> IntArray:
    """All ids of entries, in order: those accepted before the last ones, and the last ones."""
    ids = np.empty(int(num_ids.sum()), np.int32)
    is_last = np.zeros(len(ids), np.bool_)
    is_last[num_ids.cumsum() - 1] = True
    ids[is_last] = last_ids
    ids[~is_last] = accepted
    return ids
