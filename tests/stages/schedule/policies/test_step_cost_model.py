"""Properties of the step cost model, on machines with known coefficients."""

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.schedule.policies.step_cost_model import NUM_KNOWN, NUM_SAME_WAY, StepCostModel
from tests.slices import part_of

Features = tuple[int, int, int, float]

MACHINES = {
    "small model on two cores": (5e-3, 3e-4, 2e-7, 4e-4, 5e-8),
    "large model": (8e-2, 4e-3, 1e-6, 1e-2, 1e-6),
    "accelerator": (6e-3, 2e-5, 5e-9, 1e-5, 4e-9),
    "nothing but a constant": (1e-2, 0.0, 0.0, 0.0, 0.0),
    "attention costs nothing": (2e-3, 5e-4, 0.0, 5e-4, 0.0),
    "no cost of its own": (0.0, 1e-3, 1e-7, 1e-3, 1e-7),
}


class Machine:
    """Takes steps in a known time, with noise."""

    def __init__(self, coefficients: tuple[float, ...], seed: int = 1, noise: float = 0.05) -> None:
        self.coefficients = coefficients
        self.random = random.Random(seed)
        self.noise = noise
        self.speed = 1.0
        self.times = StepCostModel()

    def true_s(self, step: Features) -> float:
        a, *rest = self.coefficients
        return (a + sum(each * feature for each, feature in zip(rest, step, strict=True))) / self.speed

    def take(self, step: Features, times: float = 1.0) -> None:
        self.times.observe(*step, self.true_s(step) * times * self.random.lognormvariate(0, self.noise))

    def decode(self, num: int = 0, context: int = 0) -> Features:
        num = num or self.random.choice([1, 2, 3, 4, 8, 13, 16, 32])
        return num, sum(context or self.random.randint(10, 2000) for _ in range(num)), 0, 0.0

    def chunk(self, num_decodes: int = -1) -> Features:
        num = self.random.choice([0, 0, 1, 4, 16]) if num_decodes < 0 else num_decodes
        context = self.decode(num)[1] if num else 0
        count, start = self.random.randint(2, 512), self.random.choice([0, 0, 300, 1500])
        return num, context, count, count * (start + count / 2)

    def mixed(self) -> Features:
        return self.chunk() if self.random.random() < 0.3 else self.decode()

    def errors(self, steps: list[Features]) -> list[float]:
        """Relative errors of predictions, in increasing order."""
        return sorted(abs(self.times.predict(*step) / self.true_s(step) - 1) for step in steps)

    def assert_knows(self, typical: float = 0.05, worst: float = 0.15) -> None:
        """For mixed steps, and for decodes and chunks separately."""
        other = Machine(self.coefficients, seed=99)
        for steps in ([other.decode() for _ in range(100)], [other.chunk() for _ in range(100)]):
            errors = self.errors(steps)
            assert median(errors) < typical
            assert errors[-1] < worst


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_predicts_step_times_despite_noise(name: str, seed: int) -> None:
    machine = Machine(MACHINES[name], seed)
    for _ in range(150):
        machine.take(machine.mixed())
    machine.assert_knows(0.06, 0.25)
    for _ in range(1500):
        machine.take(machine.mixed())
    machine.assert_knows(0.04, 0.12)


def test_without_noise_it_finds_the_coefficients() -> None:
    machine = Machine((5e-3, 3e-4, 2e-7, 4e-4, 5e-8), noise=0.0)
    for _ in range(6000):
        machine.take(machine.mixed())
    for found, true in zip(machine.times.coefficients, machine.coefficients, strict=True):
        assert found == pytest.approx(true, rel=0.02)


def test_long_decoding_does_not_forget_the_cost_of_prefill() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(600):
        machine.take(machine.mixed())
    before = [machine.times.prefill_s(start, count) for start in (0, 1000) for count in (16, 400)]
    for number in range(20_000):
        machine.take(machine.decode(8, 500 + number % 1000))
    after = [machine.times.prefill_s(start, count) for start in (0, 1000) for count in (16, 400)]
    assert after == pytest.approx(before, rel=0.1)
    machine.assert_knows(0.05, 0.15)


def test_a_constant_load_changes_only_its_own_predictions() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(600):
        machine.take(machine.mixed())
    same = machine.decode(16, 700)
    for _ in range(10_000):
        machine.take(same)
    assert machine.errors([same])[0] < 0.03
    machine.assert_knows(0.06, 0.2)


def test_one_constant_load_is_known_and_others_are_interpolated() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(500):
        machine.take((16, 16_000, 0, 0.0))
    at_16 = machine.true_s((16, 16_000, 0, 0.0))
    assert machine.times.predict(16, 16_000, 0, 0.0) == pytest.approx(at_16, rel=0.03)
    assert 0 < machine.times.predict(1, 1000, 0, 0.0) < at_16 < machine.times.predict(32, 32_000, 0, 0.0) < 2 * at_16


def test_one_step_that_takes_ten_times_as_long_changes_little() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(300):
        machine.take(machine.mixed())
    steps = [machine.mixed() for _ in range(200)]
    before = [machine.times.predict(*step) for step in steps]
    machine.take(machine.decode(), times=10)
    assert [machine.times.predict(*step) for step in steps] == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("factor", [10, 0.1])
def test_outliers_are_tolerated(factor: float) -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(2000):
        machine.take(machine.mixed(), times=factor if machine.random.random() < 0.03 else 1)
    machine.assert_knows(0.06, 0.15)


@pytest.mark.parametrize("speed", [0.1, 1 / 3, 2, 5])
def test_a_sudden_change_of_speed_is_followed_at_once(speed: float) -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(800):
        machine.take(machine.mixed())
    machine.speed = speed
    for _ in range(60):
        machine.take(machine.mixed())
    machine.assert_knows(0.15, 0.3)
    for _ in range(400):
        machine.take(machine.mixed())
    machine.assert_knows(0.05, 0.15)


def test_a_change_of_speed_in_decodes_also_applies_to_chunks() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(600):
        machine.take(machine.mixed())
    for number in range(100):
        machine.take(machine.decode(8, 500 + number))
    machine.speed = 0.5
    for number in range(3 * NUM_SAME_WAY):
        machine.take(machine.decode(8, 600 + number))
    machine.assert_knows(0.15, 0.3)


def test_a_nonlinear_machine_is_predicted_at_its_actual_load() -> None:
    """Steps of 9 rows and more take twice as long: not linear, but constant loads are learned, and nothing diverges."""
    machine = Machine(MACHINES["small model on two cores"])

    def kinked_s(step: Features) -> float:
        return machine.true_s(step) * (2 if step[0] > 8 else 1)

    for phase in range(20):
        num = 4 if phase % 2 else 16
        for number in range(200):
            step = machine.decode(num, 300 + number)
            machine.times.observe(*step, kinked_s(step) * machine.random.lognormvariate(0, 0.05))
        assert machine.times.predict(*step) == pytest.approx(kinked_s(step), rel=0.15)


def test_no_prediction_before_the_first_step_and_none_for_prefill_before_some_chunks() -> None:
    machine = Machine(MACHINES["large model"], noise=0.0)
    times = machine.times
    assert times.predict(8, 1000, 10, 100) == times.prefill_s(0, 10) == 0.0
    assert times.max_chunk(0.01, 8, 1000, 0, 256) == 256
    for _ in range(50):
        machine.take(machine.decode())
    assert not times.is_known
    for number in range(NUM_KNOWN):
        assert not times.is_known, number
        machine.take(machine.chunk())
    assert times.is_known


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_impossible_times_are_ignored(seconds: float) -> None:
    machine = Machine(MACHINES["large model"])
    machine.take(machine.mixed())
    before = machine.times.coefficients
    machine.times.observe(1, 10, 0, 0, seconds)
    assert machine.times.coefficients == before


def test_the_same_steps_give_the_same_predictions() -> None:
    machines = [Machine(MACHINES["accelerator"], seed=7) for _ in range(2)]
    for machine in machines:
        for _ in range(300):
            machine.take(machine.mixed())
    assert machines[0].times.coefficients == machines[1].times.coefficients


steps = st.tuples(
    st.integers(0, 1024), st.integers(0, 4096), st.integers(0, 8192), st.integers(0, 32768), st.floats(1e-5, 100.0)
)


@given(st.lists(steps, min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=part_of(150, 40), deadline=None)
def test_predictions_are_never_negative_nor_unreasonably_large(
    history: list[tuple[int, int, int, int, float]], times: int
) -> None:
    model = StepCostModel()
    longest_s = max(seconds for *_, seconds in history)
    for _ in range(times):
        for num, context, count, start, seconds in history:
            model.observe(num, num * context, count, count * (start + count / 2), seconds)
    assert all(0 <= each <= 1000 * longest_s for each in model.coefficients)
    for num, context, count, start, _ in history:
        predicted = model.predict(num, num * context, count, count * (start + count / 2))
        assert 0 <= predicted < float("inf")


coefficient = st.one_of(st.just(0.0), st.floats(1e-10, 1e-2))


@given(
    st.tuples(coefficient, coefficient, coefficient, coefficient, coefficient),
    st.floats(0, 2.0),
    st.integers(0, 64),
    st.integers(0, 100_000),
    st.integers(0, 32_768),
    st.integers(0, 300),
)
@settings(max_examples=part_of(300, 75), deadline=None)
def test_the_largest_chunk_is_the_largest_that_fits(
    coefficients: tuple[float, float, float, float, float],
    budget_s: float,
    num_decodes: int,
    context: int,
    start: int,
    most: int,
) -> None:
    model = StepCostModel()
    model.coefficients = coefficients
    fitting = [
        count
        for count in range(1, most + 1)
        if model.predict(num_decodes, context, count, count * (start + count / 2)) <= budget_s
    ]
    assert model.max_chunk(budget_s, num_decodes, context, start, most) == max(fitting, default=0)


def test_the_cost_of_a_chunk_is_the_difference_of_predictions() -> None:
    machine = Machine(MACHINES["small model on two cores"])
    for _ in range(300):
        machine.take(machine.mixed())
    times = machine.times
    grown_s = times.predict(4, 4000, 200, 200 * (1000 + 100)) - times.predict(4, 4000, 0, 0)
    assert times.prefill_s(1000, 200) == pytest.approx(grown_s)
