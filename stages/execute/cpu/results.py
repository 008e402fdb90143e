"""The results of a step on a CPU: ids are appended to their rows, and rows that stop or fail end."""

from typing import Any, NamedTuple

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import ByteArray, FloatArray, ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import IntArray, LongArray, StepInputs
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.drafts.speculation import Speculator, Verified, merged
from pipeline.stages.execute.pooling.pool import Pool
from pipeline.stages.execute.program import LogitArray
from pipeline.stages.execute.prompt_logprobs import NO_BYTES, prompt_token_indices
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature, no_token_error

NO_SIZES: LongArray = np.zeros(0, np.int64)


class Computed(NamedTuple):
    """Results of the entries that have not ended: parallel arrays, one value for each with `samples` set."""

    ids: IntArray
    """`NO_ID` if no id can be sampled"""
    token_outputs: ByteArray = NO_BYTES
    token_output_sizes: LongArray = NO_SIZES
    """Bytes of each id's logprobs or embedding; empty if none has any"""
    prompt_logprobs: ByteArray = NO_BYTES
    verified: Verified | None = None
    """If ids were proposed; `ids` are then the last ones of each entry, and its outputs come one after the other."""


NOTHING = Computed(np.empty(0, np.int32))
"""The result of a step whose rows have all ended."""


class Results:
    """Makes the results of steps. Appends ids to the runner's rows, and ends those that stop or fail."""

    def __init__(self, rows: RowTable, failed: dict[int, str], speculator: Speculator | None, *, samples: bool) -> None:
        """`failed` are rows whose sequence can't continue, and why. Without `samples`, other stages of the pipeline
        sample."""
        self._rows, self._failed, self._speculator, self._samples = rows, failed, speculator, samples
        self.nan_rows: frozenset[int] = frozenset()
        """The rows without an id whose logits were NaN in the last step in which any row had no id."""

    def find_nan(self, ids: IntArray, rows: IntArray, logits: LogitArray) -> None:
        """Find out for which `rows` no id could be sampled because their logits are NaN, not because their request
        excludes all tokens. `logits` are [samples, vocabulary]."""
        indices = np.flatnonzero(ids == NO_ID).tolist()
        self.nan_rows = frozenset(int(rows[at]) for at in indices if np.isnan(logits[at]).any())

    def make(
        self,
        rows: IntArray,
        running: BoolArray | None,
        computed: Computed,
        num_rows: int,
        num_tokens: int,
        num_copies: int,
        copy_s: float,
    ) -> Sampled:
        """Append ids to their rows, and end the rows that stop or fail. `running` are the rows that had not ended
        before, None if none had; the others get no id."""
        if not self._samples:
            none = np.empty(0, np.int32)
            return Sampled(
                none, none.view(np.uint32), none, none.view(np.uint8), num_rows, num_tokens, num_copies, copy_s
            )
        ids, token_outputs = computed.ids, computed.token_outputs
        errors: tuple[str, ...] = ()
        if running is None and not self._failed and not np.count_nonzero(ids == NO_ID):
            finishes = self._rows.append_ids(rows, ids)  # in nearly every step
        else:
            running = np.ones(len(rows), np.bool_) if running is None else running
            ids, finishes, token_outputs, errors = self._partial_result(rows, running, computed)
        sampled = Sampled(
            rows,
            self._rows.generations[rows],
            ids,
            finishes,
            num_rows,
            num_tokens,
            num_copies,
            copy_s,
            token_outputs,
            computed.prompt_logprobs,
            errors,
        )
        return sampled if computed.verified is None else self._with_accepted(sampled, running, computed.verified)

    def _with_accepted(self, sampled: Sampled, running: BoolArray | None, verified: Verified) -> Sampled:
        """A result with the accepted ids, which come before the last ones of their rows."""
        num_ids, num_drafts = np.ones(len(sampled.rows), np.int64), np.zeros(len(sampled.rows), np.int64)
        has_logits = self._rows.features[sampled.rows] & SamplingFeature.EMBEDDING == 0
        if running is not None:
            has_logits &= running
        proposer = None if self._speculator is None else self._speculator.proposer
        num_ids[has_logits], num_drafts[has_logits] = verified.num_ids, verified.num_drafts
        return sampled._replace(
            ids=merged(sampled.ids, num_ids, verified.accepted),
            num_tokens=sampled.num_tokens + int(num_drafts.sum()),
            num_ids=num_ids.astype(np.int32),
            num_drafts=num_drafts.astype(np.int32),
            draft_s=0.0 if proposer is None else proposer.draft_s,
            draft_pass_s=0.0 if proposer is None else proposer.pass_s,
        )

    def _partial_result(
        self, rows: IntArray, running: BoolArray, computed: Computed
    ) -> "tuple[IntArray, np.ndarray[Any, np.dtype[np.uint8]], ByteArray, tuple[str, ...]]":
        """Ids, finishes, token outputs and errors if rows had ended or fail."""
        ids = np.full(len(rows), NO_ID, np.int32)
        finishes = np.full(len(rows), Finish.NONE, np.uint8)
        token_outputs = computed.token_outputs
        errors: tuple[str, ...] = ()
        failing = computed.ids == NO_ID
        if self._failed:
            failing |= np.isin(rows[running], list(self._failed))
        if failing.any():
            errors = tuple(self._fail(row) for row in rows[running][failing].tolist())
            finishes[np.flatnonzero(running)[failing]] = Finish.ERROR
            if len(computed.token_output_sizes):
                token_outputs = token_outputs[np.repeat(~failing, computed.token_output_sizes)]
            computed = computed._replace(ids=computed.ids[~failing])
            running = running & (finishes != Finish.ERROR)
        ids[running] = computed.ids
        finishes[running] = self._rows.append_ids(rows[running], computed.ids)
        return ids, finishes, token_outputs, errors

    def _fail(self, row: int) -> str:
        """End a row that has no id. Returns the error."""
        table = self._rows
        table.end(row)
        num_output = int(table.num_ids[row] - table.num_prompt[row])
        has_grammar = bool(table.features[row] & SamplingFeature.GRAMMAR_MASK)
        why = no_token_error(table.logits_processors[row], num_output, has_grammar, row in self.nan_rows)
        return self._failed.pop(row, why)


def pool_tokens(
    pool: Pool,
    table: RowTable,
    rows: IntArray,
    samples: BoolArray,
    pooled: BoolArray,
    inputs: StepInputs,
    residual: FloatArray,
) -> list[FloatArray]:
    """Add the tokens of a step's `pooled` entries to their rows' sums. `residual` is [tokens, hidden_size], before the
    last norm. Returns the results of those entries that sample, in order."""
    embeddings = []
    for i in np.flatnonzero(pooled).tolist():
        row, start, count = int(rows[i]), int(inputs.starts[i]), int(inputs.counts[i])
        tokens = residual[inputs.offsets[i] : inputs.offsets[i] + count]
        pool.add(row, table.pooling[row], start, tokens)
        if samples[i]:
            embeddings.append(pool.take(row, table.pooling[row], start + count, tokens[-1]))
    return embeddings


def with_embeddings(computed: Computed, pooled: BoolArray, embeddings: list[FloatArray]) -> Computed:
    """Merge embeddings, float32, with the logprobs of sampled ids. `pooled` says which entries have
    one; `computed` has the others. An embedding that is not finite gives its entry no id, so that its row fails."""
    ids, token_output_sizes = np.zeros(len(pooled), np.int32), np.zeros(len(pooled), np.int64)
    ids[~pooled] = computed.ids
    ids[pooled] = [0 if np.isfinite(embedding).all() else NO_ID for embedding in embeddings]
    if len(computed.token_output_sizes):
        token_output_sizes[~pooled] = computed.token_output_sizes
    token_output_sizes[pooled] = [embedding.nbytes for embedding in embeddings]
    token_outputs = np.empty(int(token_output_sizes.sum()), np.uint8)
    theirs = np.repeat(pooled, token_output_sizes)
    token_outputs[~theirs] = computed.token_outputs
    if embeddings:
        token_outputs[theirs] = np.concatenate(embeddings, axis=None).view(np.uint8)
    return computed._replace(ids=ids, token_outputs=token_outputs, token_output_sizes=token_output_sizes)


def score_prompts(
    table: RowTable, rows: IntArray, program: Program, inputs: StepInputs, scores: ScoreInputs
) -> ByteArray:
    """Logprobs of the prompt tokens that follow each position of a step, for the entries that request them, in
    order."""
    num = len(rows)
    token_indices, ids, num_top = prompt_token_indices(
        table, rows, inputs.starts[:num], inputs.counts[:num], inputs.offsets[:num]
    )
    if not len(token_indices):
        return NO_BYTES
    parts = []
    for begin in range(0, len(token_indices), inputs.max_num_rows):
        piece = slice(begin, begin + inputs.max_num_rows)
        scores.fill(token_indices[piece], ids[piece], num_top[piece])
        program.score()
        parts.append(scores.logprobs.memory)
    return np.concatenate(parts)
