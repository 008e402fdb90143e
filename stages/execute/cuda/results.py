"""Reads the result of a completed step: ids, stops, logprobs, embeddings and errors."""

from collections.abc import Sequence

import numpy as np

from pipeline.kernels.logprob_inputs import ByteArray
from pipeline.kernels.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.step import DEAD, STAMP_WORDS
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cuda.launched_step import BoolArray, LaunchedStep
from pipeline.stages.execute.pooling import Pool
from pipeline.stages.execute.prompt_logprobs import NO_BYTES
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.runner import Sampled
from pipeline.stages.execute.sampling_features import SamplingFeature, no_token_error


class ResultReader:
    """Owned by the runner. Updates the row table with what the steps have sampled."""

    def __init__(self, rows: RowTable, pool: Pool, failed: dict[int, str], hidden_size: int) -> None:
        """`failed` holds the errors of rows whose step is in flight; reading a result removes them."""
        self._rows, self._pool, self._failed, self._hidden_size = rows, pool, failed, hidden_size

    def read(self, launched_step: LaunchedStep) -> Sampled:
        """The result of a step that is over. Sets its start and end times. Call it in the order of steps."""
        num_samples, slot = launched_step.num_samples, launched_step.slot
        if num_samples:
            launched_step.start_ns, launched_step.end_ns = slot.times.tolist()
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
        is_current = self._rows.taken[rows] & (self._rows.generations[rows] == launched_step.generations)
        failing = ids == NO_ID
        errors: tuple[str, ...] = ()
        if failing.any():
            errors = tuple(self._error(launched_step, i, bool(is_current[i])) for i in np.flatnonzero(failing).tolist())
            finishes[failing] = Finish.ERROR
        dead = ids == DEAD
        ended = (failing | dead | (finishes == Finish.STOP)) & is_current
        self._rows.ended[rows[ended]] = True
        if self._rows.requested_features & SamplingFeature.GRAMMAR_MASK:
            grown = is_current & ~failing & ~dead
            self._rows.ids[rows[grown], launched_step.known[grown]] = ids[grown]
            self._rows.num_ids[rows[grown]] = launched_step.known[grown] + 1
        ids[dead] = NO_ID
        token_outputs = self._token_outputs(launched_step, ids)
        num_dead = int(np.count_nonzero(dead))
        return Sampled(
            *(rows, launched_step.generations, ids, finishes),
            num_rows=launched_step.num_rows - num_dead,
            num_tokens=launched_step.num_tokens - num_dead,
            num_copies=launched_step.num_copies,
            copy_s=0.0 if launched_step.host_transfer is None else launched_step.host_transfer.seconds,
            token_outputs=token_outputs,
            prompt_logprobs=concatenate(
                [part for token_outputs in launched_step.prompt_logprobs for part in token_outputs.split()]
            ),
            errors=errors,
        )

    def _error(self, launched_step: LaunchedStep, i: int, is_current: bool) -> str:
        """Why a row has no id."""
        row, table = int(launched_step.rows[i]), self._rows
        if not is_current:
            return "The sequence was dropped"
        num_output = int(launched_step.known[i] - table.num_prompt[row])
        error = no_token_error(
            table.logits_processors[row], num_output, bool(table.features[row] & SamplingFeature.GRAMMAR_MASK)
        )
        return self._failed.pop(row, error)

    def _token_outputs(self, launched_step: LaunchedStep, ids: IntArray) -> ByteArray:
        """Logprobs and embeddings of the step's ids, concatenated."""
        if launched_step.logprobs is None and not launched_step.hidden_states:
            return NO_BYTES
        parts: dict[int, ByteArray] = {}
        if launched_step.logprobs is not None:
            places = np.arange(len(ids)) if launched_step.pooled is None else np.flatnonzero(~launched_step.pooled)
            records = zip(places.tolist(), launched_step.logprobs.split(), strict=True)
            parts = {place: record for place, record in records if ids[place] >= 0}
        for entry in launched_step.hidden_states:
            if not self._rows.taken[entry.row] or self._rows.generations[entry.row] != entry.generation:
                # The row was dropped, and its sum too. The scheduler expects a record, but ignores it.
                if entry.place >= 0:
                    parts[entry.place] = np.zeros(4 * self._hidden_size, np.uint8)
                continue
            tokens = entry.hidden_states.numpy()
            self._pool.add(entry.row, entry.start, tokens)
            if entry.place >= 0:
                pooling, num_tokens = self._rows.pooling[entry.row], entry.start + len(tokens)
                parts[entry.place] = self._pool.take(entry.row, pooling, num_tokens, tokens[-1]).view(np.uint8)
        return concatenate([parts[place] for place in sorted(parts)])


def concatenate(parts: Sequence[ByteArray]) -> ByteArray:
    """`parts` in one array."""
    return np.concatenate(parts) if parts else NO_BYTES
