"""Reads the result of a completed step: ids, stops, logprobs, embeddings and errors."""

from collections.abc import Sequence

import numpy as np

from pipeline.kernels.sampling.logits_processors import allows_any
from pipeline.kernels.sampling.logprob_inputs import ByteArray
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.kernels.triton.step import DEAD, STAMP_WORDS
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.rows.batches import BoolArray
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.drafts.speculation import Speculator, merged
from pipeline.stages.execute.pooling.pool import Pool
from pipeline.stages.execute.prompt_logprobs import NO_BYTES
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature, no_token_error


class ResultReader:
    """Owned by the runner. Updates the row table with what the steps have sampled."""

    def __init__(
        self,
        rows: RowTable,
        pool: Pool,
        failed: dict[int, str],
        hidden_size: int,
        device_rows: DeviceRows,
        speculator: Speculator | None = None,
    ) -> None:
        """`failed` holds the errors of rows whose step is in flight; reading a result removes them. With a
        `speculator`, the table follows all sampled ids, because proposals are made of them."""
        self._rows, self._pool, self._failed, self._hidden_size = rows, pool, failed, hidden_size
        self._device_rows, self._speculator = device_rows, speculator

    def read(self, launched_step: LaunchedStep) -> Sampled:
        """The result of a step that is over. Sets its start and end times. Call it in the order of steps."""
        num_samples, slot = launched_step.num_samples, launched_step.slot
        if num_samples:
            launched_step.start_ns, launched_step.end_ns = slot.times.tolist()
        if launched_step.num_drafts is not None:
            return self._verified_result(launched_step, launched_step.num_drafts)
        num_sampled = (
            len(launched_step.rows) if launched_step.pooled is None else int(np.count_nonzero(~launched_step.pooled))
        )
        begin = STAMP_WORDS + num_samples
        sampled_ids = slot.result_array[STAMP_WORDS : STAMP_WORDS + num_sampled].copy()
        stopped = slot.result_array[begin : begin + num_sampled]
        if launched_step.is_token_only and not np.count_nonzero(stopped) and not np.count_nonzero(sampled_ids < 0):
            return self._plain_result(launched_step, sampled_ids)
        return self._full_result(launched_step, sampled_ids, stopped.astype(np.bool_))

    def _plain_result(self, launched_step: LaunchedStep, sampled_ids: IntArray) -> Sampled:
        """The result of a step without sampling extras in which no row ended: the common case."""
        if self._speculator is not None:
            self._append(launched_step, sampled_ids, np.ones(len(sampled_ids), np.bool_))
        return Sampled(
            *(launched_step.rows, launched_step.generations, sampled_ids, np.zeros(len(sampled_ids), np.uint8)),
            num_rows=launched_step.num_rows,
            num_tokens=launched_step.num_tokens,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
        )

    def _full_result(self, launched_step: LaunchedStep, sampled_ids: IntArray, stopped: BoolArray) -> Sampled:
        """The result of any step. `sampled_ids` and `stopped` are those of the rows that are not pooled."""
        rows, num = launched_step.rows, len(launched_step.rows)
        ids = np.zeros(num, np.int32)
        finishes = np.full(num, Finish.NONE, np.uint8)
        is_sampled = np.ones(num, np.bool_) if launched_step.pooled is None else ~launched_step.pooled
        ids[is_sampled] = sampled_ids
        finishes[is_sampled] = np.where(stopped, Finish.STOP, Finish.NONE)
        is_current = self._is_current(launched_step)
        embeddings, not_finite = self._embeddings(launched_step)
        ids[not_finite] = NO_ID
        failing = ids == NO_ID
        errors: tuple[str, ...] = ()
        if failing.any():
            errors = tuple(self._error(launched_step, i, bool(is_current[i])) for i in np.flatnonzero(failing).tolist())
            finishes[failing] = Finish.ERROR
        dead = ids == DEAD
        ended = (failing | dead | (finishes == Finish.STOP)) & is_current
        self._rows.ended[rows[ended]] = True
        if self._speculator is not None or self._rows.requested_features & SamplingFeature.GRAMMAR_MASK:
            self._append(launched_step, ids, is_sampled & ~failing & ~dead)
        ids[dead] = NO_ID
        token_outputs = _in_order(self._logprobs_of(launched_step, ids) | embeddings)
        num_dead = int(np.count_nonzero(dead))
        return Sampled(
            *(rows, launched_step.generations, ids, finishes),
            num_rows=launched_step.num_rows - num_dead,
            num_tokens=launched_step.num_tokens - num_dead,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
            token_outputs=token_outputs,
            prompt_logprobs=_prompt_logprobs(launched_step),
            errors=errors,
        )

    def _verified_result(self, launched_step: LaunchedStep, num_drafts: LongArray) -> Sampled:
        """The result of a step with proposed ids, of which the right ones are kept. No row has changed since it was
        launched, because the scheduler waits for it."""
        assert self._speculator is not None
        table, rows, num = self._rows, launched_step.rows, len(launched_step.rows)
        has_logits = np.ones(num, np.bool_) if launched_step.pooled is None else ~launched_step.pooled
        num_each = 1 + num_drafts[has_logits]
        num_samples = int(num_each.sum())
        sampled_ids = launched_step.slot.result_array[STAMP_WORDS : STAMP_WORDS + num_samples]
        lives = (sampled_ids[num_each.cumsum() - num_each] != DEAD) & self._is_current(launched_step)[has_logits]
        is_read = np.repeat(lives, num_each)
        indices = np.flatnonzero(has_logits)[lives]
        read_ids = sampled_ids[is_read].copy()
        split = [] if launched_step.logprobs is None else launched_step.logprobs.split()
        parts = [part if token >= 0 else part[:0] for part, token in zip(split, sampled_ids.tolist(), strict=False)]
        parts = [part for part, is_its in zip(parts, is_read.tolist(), strict=False) if is_its]
        sizes: LongArray = np.array([len(part) for part in parts], np.int64)
        running, known = rows[indices], table.num_ids[rows[indices]]
        verified = self._speculator.verify(
            running, num_drafts[indices], read_ids, concatenate(parts), sizes, self._failed
        )
        ids, num_ids = np.zeros(num, np.int32), np.ones(num, np.int64)
        ids[has_logits] = NO_ID
        ids[indices], num_ids[indices] = verified.last_ids, verified.num_ids
        finishes = np.full(num, Finish.NONE, np.uint8)
        failing = np.zeros(num, np.bool_)
        failing[indices] = verified.last_ids == NO_ID
        embeddings, not_finite = self._embeddings(launched_step)
        ids[not_finite], failing[not_finite] = NO_ID, True
        errors = tuple(self._error(launched_step, i, True) for i in np.flatnonzero(failing).tolist())
        finishes[failing] = Finish.ERROR
        table.ended[rows[failing]] = True
        grown = indices[verified.last_ids != NO_ID]
        finishes[grown] = table.append_ids(rows[grown], ids[grown])
        self._device_rows.verified(running, known)
        ends = verified.token_output_sizes.cumsum() if len(sizes) else sizes
        begins = ends - verified.token_output_sizes
        by_index = {
            index: verified.token_outputs[begin:end]
            for index, begin, end in zip(indices.tolist(), begins.tolist(), ends.tolist(), strict=bool(len(sizes)))
        }
        num_dead = int(np.count_nonzero(~lives))
        return Sampled(
            rows,
            launched_step.generations,
            merged(ids, num_ids, verified.accepted),
            finishes,
            num_rows=launched_step.num_rows - num_dead,
            num_tokens=launched_step.num_tokens - num_dead,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
            token_outputs=_in_order(by_index | embeddings),
            prompt_logprobs=_prompt_logprobs(launched_step),
            errors=errors,
            num_ids=num_ids.astype(np.int32),
            num_drafts=num_drafts.astype(np.int32),
            draft_s=launched_step.draft_s,
            draft_pass_s=launched_step.draft_pass_s,
        )

    def _is_current(self, launched_step: LaunchedStep) -> BoolArray:
        """Which rows of the samples have not been dropped since the launch."""
        rows = launched_step.rows
        is_current: BoolArray = self._rows.taken[rows] & (self._rows.generations[rows] == launched_step.generations)
        return is_current

    def _append(self, launched_step: LaunchedStep, ids: IntArray, is_there: BoolArray) -> None:
        """Append sampled ids to their rows in the table; the GPU has done so already. Some samples have none."""
        grown = is_there & self._is_current(launched_step)
        rows, known = launched_step.rows[grown], launched_step.known[grown]
        self._rows.ids[rows, known] = ids[grown]
        self._rows.num_ids[rows] = known + 1

    def _error(self, launched_step: LaunchedStep, i: int, is_current: bool) -> str:
        """Why a row has no id."""
        row, table = int(launched_step.rows[i]), self._rows
        if not is_current:
            return "The sequence was dropped"
        known, processors = int(launched_step.known[i]), table.logits_processors[row]
        has_grammar = bool(table.features[row] & SamplingFeature.GRAMMAR_MASK)
        # The mask is not here any more, so that with both the logits may have been NaN too.
        is_nan = processors is not None and not has_grammar and allows_any(processors, known, table.vocab_size)
        error = no_token_error(processors, known - int(table.num_prompt[row]), has_grammar, is_nan)
        return self._failed.pop(row, error)

    @staticmethod
    def _logprobs_of(launched_step: LaunchedStep, ids: IntArray) -> dict[int, ByteArray]:
        """The logprobs of each place that has an id."""
        if launched_step.logprobs is None:
            return {}
        indices = np.arange(len(ids)) if launched_step.pooled is None else np.flatnonzero(~launched_step.pooled)
        by_index = zip(indices.tolist(), launched_step.logprobs.split(), strict=True)
        return {index: logprobs for index, logprobs in by_index if ids[index] >= 0}

    def _embeddings(self, launched_step: LaunchedStep) -> tuple[dict[int, ByteArray], list[int]]:
        """The step's embeddings by place, and the places of those that are not finite, whose rows fail."""
        parts: dict[int, ByteArray] = {}
        not_finite: list[int] = []
        for entry in launched_step.hidden_states:
            if not self._rows.taken[entry.row] or self._rows.generations[entry.row] != entry.generation:
                # The row was dropped, and its sum too. The scheduler expects a token output, but ignores it.
                if entry.index >= 0:
                    parts[entry.index] = np.zeros(4 * self._hidden_size, np.uint8)
                continue
            tokens = entry.hidden_states.numpy()
            pooling = self._rows.pooling[entry.row]
            self._pool.add(entry.row, pooling, entry.start, tokens)
            if entry.index >= 0:
                num_tokens = entry.start + len(tokens)
                embedding = self._pool.take(entry.row, pooling, num_tokens, tokens[-1])
                if np.isfinite(embedding).all():
                    parts[entry.index] = embedding.view(np.uint8)
                else:
                    not_finite.append(entry.index)
        return parts, not_finite


def _in_order(parts: dict[int, ByteArray]) -> ByteArray:
    """Logprobs and embeddings of the step's ids, concatenated."""
    return concatenate([parts[index] for index in sorted(parts)])


def _prompt_logprobs(launched_step: LaunchedStep) -> ByteArray:
    return concatenate([part for token_outputs in launched_step.prompt_logprobs for part in token_outputs.split()])


def concatenate(parts: Sequence[ByteArray]) -> ByteArray:
    """`parts` in one array."""
    return np.concatenate(parts) if parts else NO_BYTES
