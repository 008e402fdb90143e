"""How many ids are proposed for each row: where it pays, and where it does not."""

import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget
from pipeline.stages.schedule.policies.speculation import PROBE_EVERY, Speculation
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.rows import RowTracker
from tests.stages.schedule.bench import Bench, config


class StepTimes:
    """A step takes 10 ms, and `row_ms` more for each row or proposed id."""

    def __init__(self, num_rows: int, row_ms: float, **limits: object) -> None:
        limits = {"num_speculative_tokens": 7, "max_num_drafts": 64} | limits
        self.config = config(max_num_seqs=max(num_rows, 8), max_model_len=4096, **limits)
        self.tracker = RowTracker(self.config)
        self.tracker.max_num_tokens[:] = 4096
        self.model = StepCostModel()
        self.speculation = Speculation(self.config, self.tracker, self.model)
        for num in (num_rows, num_rows + 3) * 20:
            self.speculation.observe_step(num, 0.01 + num * row_ms / 1000)
        self.rows: Int64s = np.arange(num_rows)
        self.tracker.generation[:] = 1
        self.grant()  # the rows are new

    def grant(self, total: int = 100) -> list[int]:
        tokens = self.config.max_num_batched_tokens
        budget = StepBudget(BudgetLimits(tokens), self.model, len(self.rows), total * len(self.rows))
        before = budget.tokens
        granted = self.speculation.grant(self.rows, np.full(len(self.rows), total), budget)
        assert before - budget.tokens == granted.sum()
        return granted.tolist()

    def observe(self, num_drafts: int, num_accepted: int, times: int = 1, *, has_ended: bool = False) -> None:
        num = len(self.rows)
        for _ in range(times):
            self.speculation.observe(
                self.rows, np.full(num, num_drafts), np.full(num, num_accepted), np.full(num, has_ended)
            )


def test_one_row_gets_more_if_more_is_accepted() -> None:
    around = StepTimes(1, row_ms=1.0)
    granted = []
    for num_accepted in (7, 3, 1, 0):
        around.observe(7, num_accepted, times=40)
        granted += around.grant()
    assert granted[0] == 7 > granted[1] > granted[2] >= granted[3] == 0


def test_nothing_is_proposed_if_verifying_costs_as_much_as_decoding() -> None:
    around = StepTimes(1, row_ms=1e4)
    around.observe(7, 7, times=40)
    assert around.grant() == [0]


def test_many_rows_need_a_higher_acceptance_than_one() -> None:
    for num_rows, is_granted in ((1, True), (32, False)):
        around = StepTimes(num_rows, row_ms=1.0, max_num_batched_tokens=200)
        around.observe(4, 2, times=40)
        assert any(around.grant()) == is_granted
        around.observe(7, 7, times=80)
        assert any(around.grant())


def test_a_row_without_grants_probes_now_and_then() -> None:
    around = StepTimes(1, row_ms=1.0)
    around.observe(7, 0, times=40)
    probed = [total for total in range(100, 100 + 4 * PROBE_EVERY) if around.grant(total)[0]]
    assert np.diff(probed).tolist() == [PROBE_EVERY] * (len(probed) - 1)
    assert len(probed) == 3


def test_a_new_sequence_begins_with_the_average() -> None:
    around = StepTimes(2, row_ms=1.0)
    around.observe(7, 0, times=200)
    assert around.speculation.mean < 0.1
    around.speculation.acceptance[:] = 0.9
    around.tracker.generation[0] += 1
    assert around.grant() == [0, 7]


def test_proposals_after_the_end_of_a_text_are_not_wrong() -> None:
    around = StepTimes(1, row_ms=1.0)
    around.observe(7, 2, times=40, has_ended=True)
    assert around.speculation.acceptance[0] > 0.9
    around.observe(7, 2, times=40)
    assert around.speculation.acceptance[0] < 0.9


def test_grants_keep_the_limits() -> None:
    assert StepTimes(3, 0.1, adaptive_speculation=False, max_num_drafts=10).grant() == [7, 3, 0]
    assert StepTimes(3, 0.1, adaptive_speculation=False, max_num_batched_tokens=12).grant() == [7, 2, 0]
    around = StepTimes(3, 0.1, adaptive_speculation=False)
    around.tracker.max_num_tokens[:3] = [100, 101, 104]
    assert around.grant(total=100) == [0, 0, 3]
    around = StepTimes(1, row_ms=1.0, max_step_s=0.0145)
    around.observe(7, 7, times=40)
    assert around.grant() == [3]


def test_counts() -> None:
    around = StepTimes(2, row_ms=1.0)
    around.observe(3, 2)
    around.observe(0, 0)
    around.observe(1, 0)
    counts = around.speculation.counts()
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 8, 4)
    assert counts.num_accepted_per_pos == [2, 2, 0, 0, 0, 0, 0]


def test_a_request_with_a_prediction_gets_its_counts() -> None:
    limits = config(num_speculative_tokens=4, max_num_drafts=16, adaptive_speculation=False)
    bench = Bench(limits, depth=1)
    plain, predicting = bench.admit(range(20), 30), bench.admit(range(30), 30, predicted_ids=b"\x01\x00\x00\x00")
    bench.run()
    counts = bench.scheduler.speculation.counts()
    by_request = {bench.opened[seq].request_id: drafts for seq, drafts in bench.drafts.items()}
    assert list(by_request) == [predicting] != [plain]
    accepted, rejected = by_request[predicting]
    assert 0 < accepted < counts.num_accepted_tokens
    assert 0 < rejected < counts.num_draft_tokens - counts.num_accepted_tokens
