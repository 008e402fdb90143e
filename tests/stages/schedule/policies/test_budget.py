"""The token budget of a step, and its distribution over sequences."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.schedule.policies import policy
from pipeline.stages.schedule.policies.budget import MIN_CHUNK, BudgetLimits, StepBudget, grant_chunks, grant_decodes
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel

TOKEN_S = 0.001


@pytest.fixture(scope="module")
def cost_model() -> StepCostModel:
    """A machine that takes a millisecond for a step and one for each token."""
    learnt = StepCostModel()
    for turn in range(400):
        num_decodes, count, start = turn % 17, turn * 7 % 90, turn * 31 % 1500
        seconds = TOKEN_S * (1 + num_decodes + count)
        learnt.observe(num_decodes, num_decodes * 100, count, count * (start + count / 2), seconds)
    return learnt


def grant(need: list[int], budget: int, is_long: list[bool] | None = None) -> list[int]:
    """Without time limits."""
    lacks = np.array(need, np.int64)
    counts = grant_decodes(lacks, budget)
    prompts = np.flatnonzero(lacks > 1)
    left = StepBudget(BudgetLimits(budget), StepCostModel(), int(counts.sum()), 0)
    longs = np.array(is_long or [False] * len(need), np.bool_)
    counts[prompts] = grant_chunks(left, lacks[prompts], np.zeros(len(prompts), np.int64), longs[prompts])
    assert left.tokens == budget - counts.sum()
    return counts.tolist()


def test_decoding_rows_go_before_prompts() -> None:
    assert grant([500, 1, 300, 1], 100) == [98, 1, 0, 1]


def test_prompts_share_the_rest_by_age() -> None:
    assert grant([30, 60, 40], 100) == [30, 60, 10]


def test_long_prompts_come_after_short_ones_but_the_first_always_progresses() -> None:
    assert grant([500, 60, 400, 200], 100, [True, False, True, False]) == [16, 60, 0, 24]


def test_with_more_decoding_rows_than_budget_the_oldest_run() -> None:
    assert grant([1, 1, 1, 7], 2) == [1, 1, 0, 0]


def test_rows_that_need_nothing_get_nothing() -> None:
    assert grant([0, 1, 0], 10) == [0, 1, 0]
    assert grant([], 10) == []


@given(st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=50), st.integers(1, 600))
def test_a_grant_uses_the_budget_and_no_more(rows: list[tuple[int, bool]], budget: int) -> None:
    need = [tokens for tokens, _ in rows]
    grants = grant(need, budget, [is_long for _, is_long in rows])
    assert all(0 <= given <= needed for given, needed in zip(grants, need, strict=True))
    assert sum(grants) == min(budget, sum(need))


def test_a_time_budget_limits_prompts_next_to_decoding_rows(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, step_s=0.050), cost_model, 10, 1000)
    assert budget.chunk(0, 500, False) == pytest.approx(39, abs=3)
    assert not budget.has_room(False)
    assert budget.chunk(0, 500, False) == 0


def test_without_decoding_rows_time_is_unlimited(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, step_s=0.050, max_slowdown=1.1, long_max_slowdown=1.1), cost_model, 0, 0)
    assert budget.chunk(0, 5000, True) == 1000


def test_time_is_unlimited_before_the_cost_of_prompts_is_known() -> None:
    assert StepBudget(BudgetLimits(1000, step_s=0.001), StepCostModel(), 10, 1000).chunk(0, 500, False) == 500


def test_the_first_prompt_progresses_with_any_time_budget(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, step_s=0.001), cost_model, 10, 1000)
    assert budget.chunk(0, 500, False) == MIN_CHUNK
    assert budget.chunk(0, 500, False) == 0


def test_a_slowdown_limit_applies_to_all_prompts(cost_model: StepCostModel) -> None:
    limits = BudgetLimits(1000, max_slowdown=3.0)
    for is_long in (False, True):
        budget = StepBudget(limits, cost_model, 20, 2000)
        assert budget.chunk(0, 500, is_long) == pytest.approx(42, abs=4)
        assert not budget.has_room(False)


def test_prompts_get_their_share_of_the_open_sequences(cost_model: StepCostModel) -> None:
    """However little the limit leaves them, or the first that decodes would hold back those that came with it."""
    alone_s = cost_model.predict(2, 200, 0, 0)
    for num_prompts, slowdown in ((1, 2.0), (4, 3.0), (18, 8.0)):
        budget = StepBudget(BudgetLimits(1000, max_slowdown=2.0), cost_model, 2, 200, num_prompts)
        count = budget.chunk(0, 500, False)
        assert (
            alone_s + cost_model.prefill_s(0, count) == pytest.approx(slowdown * alone_s, rel=0.2) or count == MIN_CHUNK
        )


@pytest.mark.parametrize("num_decodes", [8, 32])
def test_waiting_prompts_slow_down_many_streams_no_more_than_one_does(
    cost_model: StepCostModel, num_decodes: int
) -> None:
    grants = [
        StepBudget(BudgetLimits(1000, max_slowdown=2.5), cost_model, num_decodes, 100 * num_decodes, num_prompts)
        .chunk(0, 500, is_long=False)
        for num_prompts in (1, 100)
    ]  # fmt: skip
    assert grants[0] == grants[1]


def test_only_the_first_prompt_of_a_step_gets_more_than_the_time_allows(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, max_slowdown=3.0), cost_model, 20, 2000)
    alone_s = cost_model.predict(20, 2000, 0, 0)
    counts = [budget.chunk(0, need, False) for need in (38, 500, 500)]
    assert counts[0] == 38 and 0 < counts[1] < MIN_CHUNK and counts[2] == 0
    assert alone_s + cost_model.prefill_s(0, sum(counts)) <= 3.0 * alone_s + 1e-9


def test_a_prompt_that_would_lack_little_is_completed(cost_model: StepCostModel) -> None:
    """Another step costs it more than a tenth of this one."""
    fitting = StepBudget(BudgetLimits(1000, max_slowdown=3.0), cost_model, 20, 2000).chunk(0, 500, False)
    alone_s = cost_model.predict(20, 2000, 0, 0)
    for more, is_completed in ((2, True), (5, True), (12, False)):
        budget = StepBudget(BudgetLimits(1000, max_slowdown=3.0), cost_model, 20, 2000)
        count = budget.chunk(0, fitting + more, False)
        assert count == fitting + more if is_completed else count < fitting
        assert alone_s + cost_model.prefill_s(0, count) <= 1.1 * 3.0 * alone_s
        assert budget.has_room(False) != is_completed
    limit_s = 3.0 * alone_s
    assert StepBudget(BudgetLimits(1000, limit_s, 3.0), cost_model, 20, 2000).chunk(0, fitting + 2, False) < fitting


def test_a_prompt_of_several_steps_gets_chunks_of_about_the_same_size(cost_model: StepCostModel) -> None:
    limits, counts = BudgetLimits(1000, max_slowdown=3.0), []
    while sum(counts) < 100:
        budget = StepBudget(limits, cost_model, 20, 2000)
        counts.append(budget.chunk(sum(counts), 100 - sum(counts), False))
    assert counts == [34, 33, 33], "42, 42 and 16 would take as many steps"
    budget = StepBudget(limits, cost_model, 20, 2000)
    assert budget.chunk(0, 100, False) == 34 and budget.chunk(0, 5, False) == 5, "others get the rest of the time"


def test_short_prompts_leave_time_for_a_deferred_long_one(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, max_slowdown=3.0, long_max_slowdown=2.0), cost_model, 20, 2000)
    alone_s = cost_model.predict(20, 2000, 0, 0)
    budget.hold_for_long(0)
    short = budget.chunk(0, 500, False)
    budget.release_held()
    long = budget.chunk(0, 5000, True, is_sure=True)
    assert short >= MIN_CHUNK and long == MIN_CHUNK
    assert alone_s + cost_model.prefill_s(0, short + long) == pytest.approx(3.0 * alone_s, rel=0.05)


def test_while_a_long_prompt_is_deferred_only_long_ones_of_lower_rank_may_start(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000), cost_model, 20, 2000)
    budget.hold_for_long(1)
    assert [budget.has_room_for_long(rank) for rank in (0, 1, 2)] == [True, False, False]
    budget.release_held()
    assert all(budget.has_room_for_long(rank) for rank in (0, 1, 2))


def test_the_limit_of_long_prompts_applies_only_to_them(cost_model: StepCostModel) -> None:
    limits = BudgetLimits(1000, long_max_slowdown=3.0)
    assert StepBudget(limits, cost_model, 20, 2000).chunk(0, 500, False) == 500
    assert StepBudget(limits, cost_model, 20, 2000).chunk(0, 500, True) == pytest.approx(42, abs=4)


def test_short_prompts_use_the_budget_of_long_ones_first(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(1000, long_max_slowdown=3.0), cost_model, 20, 2000)
    assert budget.chunk(0, 60, False) == 60
    assert budget.has_room(False) and not budget.has_room(True)
    assert budget.chunk(0, 500, True) == 0
    assert budget.chunk(0, 500, True, is_sure=True) == MIN_CHUNK


@given(
    num_decodes=st.integers(0, 30),
    step_s=st.sampled_from([0.001, 0.03, float("inf")]),
    max_slowdown=st.sampled_from([1.1, 3.0, float("inf")]),
    long_max_slowdown=st.sampled_from([1.1, 3.0, float("inf")]),
    prompts=st.lists(st.tuples(st.integers(0, 1000), st.integers(2, 2000), st.booleans()), max_size=6),
)
def test_grants_beyond_the_minimum_are_within_the_limits(
    cost_model: StepCostModel,
    num_decodes: int,
    step_s: float,
    max_slowdown: float,
    long_max_slowdown: float,
    prompts: list[tuple[int, int, bool]],
) -> None:
    budget = StepBudget(
        BudgetLimits(200, step_s, max_slowdown, long_max_slowdown), cost_model, num_decodes, num_decodes * 100
    )
    base_s = cost_model.predict(num_decodes, num_decodes * 100, 0, 0)
    counts = [budget.chunk(start, need, is_long) for start, need, is_long in prompts]
    assert sum(counts) + num_decodes + budget.tokens == 200
    if num_decodes:
        seconds = base_s + sum(
            cost_model.prefill_s(start, count) for (start, _, _), count in zip(prompts, counts, strict=True)
        )
        least_s = cost_model.prefill_s(prompts[0][0], MIN_CHUNK) if prompts else 0
        limit_s = base_s * max(max_slowdown, min(1 + 1 / num_decodes, 8 * max_slowdown / num_decodes))
        assert seconds <= max(min(step_s, 1.1 * limit_s), base_s + least_s) + 1e-6


def test_a_sequence_starts_only_if_each_running_one_can_get_its_next_block() -> None:
    assert policy.may_start(num_available=10, num_needed=8, num_running=2)
    assert not policy.may_start(num_available=10, num_needed=9, num_running=2)
    assert policy.may_start(num_available=10, num_needed=10, num_running=0)


RUN = 40
RUNS = [(10, 10 + RUN), (55, 55 + RUN)]


def chunk(budget: StepBudget, need: int, begin: int = 0, **how: Any) -> int:
    """Of a prompt with RUNS, of which `begin` positions are computed."""
    runs = [(first - begin, end - begin) for first, end in RUNS if end > begin]
    return budget.chunk(begin, need, False, runs=runs, **how)


def test_a_chunk_ends_within_no_run() -> None:
    def first(tokens: int, begin: int = 0) -> int:
        return chunk(StepBudget(BudgetLimits(tokens, run_tokens=RUN), StepCostModel(), 0, 0), 120, begin)

    assert [first(tokens) for tokens in (4, 10, 11, 49, 50, 54, 94, 95, 96)] == [4, 10, 10, 10, 50, 54, 55, 95, 96]
    assert [first(tokens, 10) for tokens in (1, 39, 40, 41)] == [40, 40, 40, 41], (
        "the first one is larger than the limit"
    )
    assert [first(tokens, 30) for tokens in (1, 19, 20, 24)] == [20, 20, 20, 24], "it is computed up to there"


def test_runs_that_are_not_sure_to_be_computed_wait_for_a_step_with_room() -> None:
    budget = StepBudget(BudgetLimits(60, run_tokens=RUN), StepCostModel(), 0, 0)
    assert budget.chunk(0, 30, False) == 30
    assert chunk(budget, 100, 10) == 0
    assert chunk(budget, 100, 0) == 10
    assert chunk(budget, 100, 10, is_sure=True) == RUN
    assert budget.tokens == 0 and chunk(budget, 100, 10, is_sure=True) == 0


def test_a_run_beyond_the_limit_leaves_long_prompts_what_is_reserved_for_them() -> None:
    budget = StepBudget(BudgetLimits(20, run_tokens=RUN), StepCostModel(), 0, 0)
    assert chunk(budget, 100, 10, reserve=10) == RUN
    assert budget.tokens == 10
    assert chunk(budget, 100, 55, is_sure=True) == RUN
    assert budget.tokens == 0


def test_a_run_takes_more_time_than_there_is_only_at_the_begin_of_a_step(cost_model: StepCostModel) -> None:
    budget = StepBudget(BudgetLimits(500, max_slowdown=4.0, run_tokens=RUN), cost_model, 8, 800)
    assert chunk(budget, 100, 10) == RUN
    budget = StepBudget(BudgetLimits(500, max_slowdown=4.0, run_tokens=RUN), cost_model, 8, 800)
    assert budget.chunk(0, 10, False) == 10
    assert chunk(budget, 100, 10) == 0
