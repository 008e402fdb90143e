"""Depth "auto" on executors whose step times are known for each depth."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.schedule.policies.depth_tuner import (
    DEPTHS,
    MARGIN,
    MAX_COST,
    MAX_ROUND_STEPS,
    MIN_BETWEEN,
    DepthTuner,
    TuningRound,
)
from tests.slices import part_of

FIRST_ROUND = 500
"""Steps until the end of a class's first round."""


class Executor:
    """A step takes 4 ms, plus 0.25 ms per row, at depth 1, and `at_2` times that at depth 2, with noise."""

    def __init__(self, at_2: float | Callable[[int], float], noise: float = 0.05, seed: int = 1) -> None:
        self.auto = DepthTuner()
        self.at_2 = at_2
        self.noise = noise
        self.random = random.Random(seed)
        self.drift = 0.0
        self.num_steps = 0
        self.total_s = self.best_s = 0.0
        self.choices: list[dict[int, int]] = [{}]
        """Each new choice"""

    def times(self, num_rows: int, depth: int) -> float:
        at_2 = self.at_2(num_rows) if callable(self.at_2) else self.at_2
        return (0.004 + 0.00025 * num_rows) * (1 + self.drift * self.num_steps) * (at_2 if depth == 2 else 1.0)

    def step(self, num_rows: int) -> None:
        seconds = self.times(num_rows, self.auto.depth)
        self.num_steps += 1
        self.total_s += seconds
        self.best_s += min(self.times(num_rows, depth) for depth in DEPTHS)
        seconds *= self.random.lognormvariate(0, self.noise)
        if self.random.random() < 0.01:
            seconds *= 20  # another process used the core
        self.auto.observe(num_rows, seconds)
        if self.auto.choices != self.choices[-1]:
            self.choices.append(self.auto.choices)

    def run(self, num_steps: int, num_rows: Callable[[int], int] = lambda _: 8) -> None:
        for number in range(num_steps):
            self.step(num_rows(number))

    @property
    def num_changes(self) -> int:
        return sum(
            before[size] != after[size]
            for before, after in zip(self.choices, self.choices[1:], strict=False)
            for size in before
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("at_2", "chosen"), [(0.7, 2), (0.92, 2), (1.09, 1), (1.5, 1), (3.0, 1)])
def test_the_first_round_finds_a_clearly_better_depth(at_2: float, chosen: int, seed: int) -> None:
    executor = Executor(at_2, seed=seed)
    executor.run(FIRST_ROUND)
    assert executor.auto.choices == {4: chosen}
    assert executor.auto.depth == chosen, "no experiment is running"


@pytest.mark.parametrize("at_2", [0.6, 0.95, 1.0, 1.05, 2.0, 4.0])
def test_the_tuner_costs_little_and_does_not_flap(at_2: float) -> None:
    executor = Executor(at_2)
    executor.run(FIRST_ROUND)
    executor.total_s = executor.best_s = 0.0
    executor.run(60_000)
    assert executor.total_s / executor.best_s - 1 < MAX_COST
    assert executor.num_changes <= 2


@pytest.mark.parametrize("seed", range(10))
def test_with_equal_depths_it_almost_always_stays_at_1(seed: int) -> None:
    executor = Executor(1.0, noise=0.1, seed=seed)
    executor.run(60_000)
    assert executor.num_changes <= 2


def test_a_difference_below_the_margin_changes_nothing() -> None:
    executor = Executor(1 - MARGIN / 2, noise=0.0)
    executor.run(20_000)
    assert executor.auto.choices == {4: 1}


def test_growing_contexts_are_not_mistaken_for_a_difference() -> None:
    executor = Executor(1.0, noise=0.02)
    executor.drift = 1 / 400  # twice as long after 400 steps
    executor.run(FIRST_ROUND)
    assert executor.auto.choices == {4: 1}
    executor = Executor(0.9, noise=0.02)
    executor.drift = 1 / 400
    executor.run(FIRST_ROUND)
    assert executor.auto.choices == {4: 2}


def test_changing_numbers_of_rows_are_not_mistaken_for_a_difference() -> None:
    for at_2, chosen in ((1.0, 1), (0.88, 2)):
        executor = Executor(at_2, noise=0.02)
        executor.run(3 * FIRST_ROUND, lambda number: 4 + number // 7 % 12)
        assert executor.auto.choices == {4: chosen}


def test_small_and_large_batches_are_tuned_separately() -> None:
    executor = Executor(lambda num_rows: 0.8 if num_rows < 4 else 1.25)
    executor.run(FIRST_ROUND, lambda _: 1)
    assert executor.auto.depth == 2
    executor.run(FIRST_ROUND, lambda _: 32)
    assert (executor.auto.depth, executor.auto.choices) == (1, {1: 2, 16: 1})
    executor.step(2)
    assert executor.auto.depth == 2
    executor.step(40)
    assert executor.auto.depth == 1


def test_an_unmeasured_batch_size_starts_with_its_neighbours_depth() -> None:
    executor = Executor(0.8)
    executor.run(FIRST_ROUND)
    for num_rows in (1, 20, 100):
        executor.step(num_rows)
        assert executor.auto.depth == 2


def test_batches_at_the_border_of_two_sizes_belong_to_one() -> None:
    executor = Executor(0.8)
    executor.run(6 * FIRST_ROUND, lambda number: 15 + number // 3 % 2)
    assert executor.auto.choices == {4: 2}


def test_the_depth_follows_a_change_of_the_machine() -> None:
    executor = Executor(0.8)
    executor.run(FIRST_ROUND)
    assert executor.auto.depth == 2
    executor.at_2 = 1.25
    executor.run(2 * MIN_BETWEEN)
    assert executor.auto.choices == {4: 1}


def test_a_round_without_comparable_steps_decides_nothing() -> None:
    one = TuningRound()
    while not one.is_over:
        one.observe(2**one.num_steps, 0.01 if one.depth == 1 else 0.001)
    assert one.differences() == []


def test_a_round_ends_despite_repeated_disturbances() -> None:
    one = TuningRound()
    for _ in range(MAX_ROUND_STEPS):
        assert not one.is_over
        one.restart_settling()
        one.observe(8, 0.01)
    assert one.is_over
    assert one.differences() == []


def test_it_starts_at_1_and_does_not_experiment_at_first() -> None:
    executor = Executor(0.5)
    assert executor.auto.depth == 1
    for _ in range(40):
        executor.step(8)
        assert executor.auto.depth == 1


def test_a_round_logs_its_result() -> None:
    auto = DepthTuner()
    decisions = [auto.observe(20, 0.010 if auto.depth == 1 else 0.012) for _ in range(FIRST_ROUND)]
    [decision] = [one for one in decisions if one is not None]
    assert (decision.num_rows, decision.depth) == (16, 1)
    assert decision.difference == pytest.approx(0.2)
    assert decision.error == pytest.approx(0.0)


def test_it_is_deterministic() -> None:
    executors = [Executor(0.9, noise=0.2, seed=5) for _ in range(2)]
    depths: list[list[int]] = [[], []]
    for executor, seen in zip(executors, depths, strict=True):
        for number in range(3000):
            executor.step(1 + number // 100 % 20)
            seen.append(executor.auto.depth)
    assert depths[0] == depths[1]


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1e6) | st.floats(-1, 0)), max_size=400))
@settings(max_examples=part_of(60, 20), deadline=None)
def test_the_depth_is_always_1_or_2(steps: list[tuple[int, float]]) -> None:
    auto = DepthTuner()
    for _ in range(3):
        for num_rows, seconds in steps:
            auto.observe(num_rows, seconds)
            assert auto.depth in DEPTHS
