"""The time of a decode step by its positions."""

import random

import pytest

from pipeline.stages.schedule.policies.step_slope import StepSlope


def test_it_learns_a_line() -> None:
    slope, rng = StepSlope(), random.Random(0)
    for _ in range(200):
        num = rng.choice((1, 1, 4, 8))
        slope.observe(num, (0.020 + 0.003 * num) * rng.uniform(0.95, 1.05))
    assert slope.slope_s == pytest.approx(0.003, rel=0.15)
    assert slope.predict(6, slope.slope_s) == pytest.approx(0.038, rel=0.1)


def test_it_follows_a_change() -> None:
    slope = StepSlope()
    for factor in (1, 2):
        for i in range(200):
            num = 1 + 3 * (i % 2)
            slope.observe(num, factor * (0.020 + 0.003 * num))
    assert slope.slope_s == pytest.approx(0.006, rel=0.05)


def test_steps_that_are_all_alike_teach_no_slope() -> None:
    slope = StepSlope()
    for _ in range(50):
        slope.observe(8, 0.05)
    assert slope.slope_s == 0
    assert slope.predict(10, 0.001) == pytest.approx(0.052)
    assert StepSlope().predict(3, 0.001) == 0


def test_one_delayed_step_changes_little() -> None:
    slope = StepSlope()
    for i in range(100):
        slope.observe(1 + i % 4, 0.02 + 0.002 * (i % 4))
    before = slope.predict(4, slope.slope_s)
    slope.observe(4, 5.0)
    assert slope.predict(4, slope.slope_s) < 1.2 * before
