"""Speculative decoding: how many ids the executor may propose for each decoding row, and what came of it.

A step that verifies k proposed ids of a row computes 1 + k of its positions. It yields the ids up to the first that was
proposed wrongly, and one more. With the row's acceptance rate α, the share of proposed ids that turn out right, that is
α + α² + … + α^k ids more than without. What these positions take is learnt from steps with and without proposals
(step_slope.py). A row gets the k with the most ids per second of the step, 0 if none pays.

    α    a moving average over the row's last proposals; a new row begins with the average of all rows
    k    at most `num_speculative_tokens`, what the limit of its ids leaves, and its share of `max_num_drafts` a step

A row for which nothing pays may propose a few ids every `PROBE_EVERY` ids, since texts change.
"""

import numpy as np

from pipeline.metrics.stats import SpeculationCounts
from pipeline.stages.schedule.arrays import Bools, Int64s
from pipeline.stages.schedule.policies.budget import StepBudget
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.policies.step_slope import StepSlope
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

FIRST_ACCEPTANCE = 0.8
"""α before anything was proposed. A high value learns quickly what proposals are worth."""
WEIGHT = 1 / 8
"""Of one proposed id in a row's α."""
MEAN_WEIGHT = 1 / 128
"""Of one proposed id in the average of all rows."""
PROBE_EVERY = 32
NUM_PROBED = 2
MARGIN = 1.1
"""A verified position is assumed to cost this much more than a decoding row: its results are sorted out one by one."""
DRAFT_WEIGHT = 1 / 8
"""Of one step in the time of a draft model's pass."""


class Speculation:
    """Owns the acceptance rates and the counts."""

    def __init__(self, config: SchedulerConfig, rows: RowTracker, cost_model: StepCostModel) -> None:
        self._most = config.num_speculative_tokens
        self._max_num_drafts = config.max_num_drafts
        self._max_step_s = config.max_step_s
        self._is_adaptive = config.adaptive_speculation
        self._rows = rows
        self._cost_model = cost_model
        num_rows = len(rows.num_tokens)
        self.acceptance = np.full(num_rows, FIRST_ACCEPTANCE)
        """α of each row."""
        self.mean = FIRST_ACCEPTANCE
        self._generations = np.zeros(num_rows, np.uint32)
        """Of the rows, when their α was set."""
        self._probed = np.zeros(num_rows, np.int64)
        """Ids of each row when it last got a grant."""
        self._steps = np.arange(1, self._most + 1)
        self._slope = StepSlope()
        self._pass_s = 0.0
        """One pass of a draft model."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_accepted_per_pos = np.zeros(self._most, np.int64)

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def grant(self, rows: Int64s, totals: Int64s, budget: StepBudget) -> Int64s:
        """How many ids may be proposed for each of these rows, which decode with `totals` ids; int64 [rows]. Takes
        the tokens from the budget."""
        num_drafts = np.minimum(self._rows.max_num_tokens[rows] - totals - 1, self._most).clip(0)
        if self._is_adaptive and len(rows):
            num_drafts = np.minimum(num_drafts, self._paying(rows, totals, budget))
        before = num_drafts.cumsum() - num_drafts
        most = max(0, min(self._max_num_drafts, budget.tokens))
        num_drafts = np.minimum(num_drafts, (most - before).clip(0))
        budget.tokens -= int(num_drafts.sum())
        self._probed[rows[num_drafts > 0]] = totals[num_drafts > 0]
        granted: Int64s = num_drafts
        return granted

    def _paying(self, rows: Int64s, totals: Int64s, budget: StepBudget) -> Int64s:
        """The k of each row with the most ids per second, or what it probes with."""
        is_new = self._generations[rows] != self._rows.generation[rows]
        if is_new.any():
            fresh = rows[is_new]
            self._generations[fresh] = self._rows.generation[fresh]
            self.acceptance[fresh] = self.mean
            self._probed[fresh] = totals[is_new]
        shape = budget.shape
        _, _, _, prompt_token_s, pair_s = self._cost_model.coefficients
        slope_s = self._slope.slope_s or prompt_token_s
        base_s = self._slope.predict(shape.num_decodes, slope_s)
        if base_s <= 0 or slope_s <= 0:
            return np.full(len(rows), NUM_PROBED)
        base_s += prompt_token_s * shape.num_chunk_tokens + pair_s * shape.pairs
        token_s = MARGIN * slope_s + self._pass_s / len(rows)
        gained = np.cumsum(self.acceptance[rows, None] ** self._steps, axis=1)
        seconds = base_s + token_s * self._steps
        rates = (len(rows) + gained) / seconds
        rates[:, seconds > self._max_step_s] = 0.0
        best: Int64s = np.argmax(rates, axis=1) + 1
        best[rates.max(axis=1) <= len(rows) / base_s] = 0
        could_pay = token_s < base_s / len(rows)
        due = could_pay & (best == 0) & (totals - self._probed[rows] >= PROBE_EVERY)
        num_drafts: Int64s = np.where(due, NUM_PROBED, best)
        return num_drafts

    def observe(self, rows: Int64s, num_drafts: Int64s, num_accepted: Int64s, has_ended: Bools) -> None:
        """What came of the ids that were proposed for these rows. If one of them ended with an accepted id, the
        proposals after it were neither right nor wrong."""
        some = num_drafts > 0
        rows, num_drafts, num_accepted = rows[some], num_drafts[some], num_accepted[some]
        num_wrong = (num_accepted < num_drafts) & ~has_ended[some]
        right = 1 - (1 - self.acceptance[rows]) * (1 - WEIGHT) ** num_accepted
        self.acceptance[rows] = np.where(num_wrong, right * (1 - WEIGHT), right)
        total_accepted, total_wrong = int(num_accepted.sum()), int(np.count_nonzero(num_wrong))
        if judged := total_accepted + total_wrong:
            gain = 1 - (1 - MEAN_WEIGHT) ** judged
            self.mean += gain * (total_accepted / judged - self.mean)
        self.num_drafts += len(rows)
        self.num_draft_tokens += int(num_drafts.sum())
        self.num_accepted_tokens += total_accepted
        self.num_accepted_per_pos += (num_accepted[:, None] >= self._steps).sum(axis=0)

    def observe_step(self, num_positions: int, seconds: float) -> None:
        """How long a step without prompts took, without a draft model's part."""
        self._slope.observe(num_positions, seconds)

    def observe_pass(self, seconds: float) -> None:
        """How long a pass of a draft model took in a step."""
        self._pass_s += (seconds - self._pass_s) * (DRAFT_WEIGHT if self._pass_s else 1.0)

    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(
            self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, self.num_accepted_per_pos.tolist()
        )
