"""Who runs, and how much."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.schedule import policy


def grant(need: list[int], budget: int) -> list[int]:
    return policy.grant(np.array(need, np.int64), budget).tolist()


def test_decoding_rows_go_before_prompts() -> None:
    assert grant([500, 1, 300, 1], 100) == [98, 1, 0, 1]


def test_prompts_share_what_is_left_by_age() -> None:
    assert grant([30, 60, 40], 100) == [30, 60, 10]


def test_with_more_decoding_rows_than_budget_the_oldest_go() -> None:
    assert grant([1, 1, 1, 7], 2) == [1, 1, 0, 0]


def test_rows_that_need_nothing_get_nothing() -> None:
    assert grant([0, 1, 0], 10) == [0, 1, 0]
    assert grant([], 10) == []


@given(st.lists(st.integers(0, 500), max_size=50), st.integers(1, 600))
def test_a_grant_uses_the_budget_and_no_more(need: list[int], budget: int) -> None:
    grants = grant(need, budget)
    assert all(0 <= given <= wanted for given, wanted in zip(grants, need, strict=True))
    assert sum(grants) == min(budget, sum(need))


def test_a_sequence_starts_only_if_each_running_one_can_have_its_next_block() -> None:
    assert policy.may_start(num_available=10, num_needed=8, num_running=2)
    assert not policy.may_start(num_available=10, num_needed=9, num_running=2)
    assert policy.may_start(num_available=10, num_needed=10, num_running=0)
