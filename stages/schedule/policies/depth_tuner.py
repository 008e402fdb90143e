"""Tunes how many steps to keep in flight, by measurement: `schedule.max_steps_in_flight = "auto"`. Pure.

At depth 1 the executor waits while the scheduler settles a result and plans the next step. At depth 2 the next step is
ready when one ends, but the scheduler planned it while that one ran, on cores that it may have needed. A GPU always
waits at depth 1. There the question is whether steps are so short that it waits at depth 2 too; depth 3 costs a new
request one more step. Which depth is faster depends on machine, model and load. So now and then both are tried in short
turns, so that drift (contexts grow) affects both alike:

    1 2 │ 2 1 │ 1 2 │ 2 1 │ 1 2 │ 2 1      a round of six pairs; each digit is a turn of `TURN_STEPS` counted steps

Only comparable steps are compared: with the same number of rows, decoding only, and planned without delay, so that the
executor did not wait for a request. A step's time runs from the end of the previous step to its own, by the device's
clock. Each pair yields how much longer steps take at the greater depth. If the mean over the pairs exceeds `MARGIN` and
twice its standard error, it decides; otherwise the choice stays.

Small and large batches may differ, so each class of batch sizes (from 1, 4, 16, 64, … rows on) has its own choice and
rounds. A batch near the border of two classes stays in the previous one. A round is repeated after some thousands of
steps of its class. The interval grows with each confirmation and with the cost of the worse depth, so that in the long
run rounds take less than `MAX_COST` of the time.
"""

from math import expm1, inf, log, log2, sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

Depths = tuple[int, int]
"""The two depths to try, the smaller first."""
DEPTHS: Depths = (1, 2)
GPU_DEPTHS: Depths = (2, 3)
NUM_PAIRS = 6
TURN_STEPS = 16
MIN_ALIKE = 4
"""A pair counts if each of its turns has at least this many comparable steps."""
SETTLING_STEPS = 3
"""Steps after a change of depth that don't count: they were planned before the change, or delayed by it."""
WARMUP_STEPS = 64
"""Steps of a class before its first round."""
MIN_BETWEEN = 4096
"""Steps of a class between two rounds; doubled each time that the choice is confirmed."""
MAX_BETWEEN = 65536
MARGIN = 0.02
"""The smallest relative difference in time per step that changes the choice."""
MAX_COST = 0.01
MAX_ROUND_STEPS = 4 * len(DEPTHS) * NUM_PAIRS * (TURN_STEPS + SETTLING_STEPS)
"""A round ends after this many steps of its class, even if too few are comparable because batch sizes vary."""


class TuningRound:
    """One round: some pairs of turns."""

    def __init__(self, depths: Depths = DEPTHS) -> None:
        self._depths = depths
        self.num_steps = 0
        self._turn = 0
        self._num_settling = SETTLING_STEPS
        self._num_counted = 0
        self._samples: list[tuple[int, int, int, float]] = []
        """Pair, depth, size and seconds of each counted step. Steps with about the same number of rows have one
        size."""

    @property
    def depth(self) -> int:
        """The depth of the current turn."""
        pair, half = divmod(self._turn, 2)
        return self._depths[half ^ (pair & 1)]

    @property
    def is_over(self) -> bool:
        return self._turn >= 2 * NUM_PAIRS or self.num_steps >= MAX_ROUND_STEPS

    def restart_settling(self) -> None:
        """Another depth was used since the last step: skip the next steps."""
        self._num_settling = SETTLING_STEPS

    def observe(self, num_rows: int, seconds: float) -> None:
        self.num_steps += 1
        if self._num_settling:
            self._num_settling -= 1
            return
        self._samples.append((self._turn // 2, self.depth, round(16 * log2(num_rows)), seconds))
        self._num_counted += 1
        if self._num_counted == TURN_STEPS:
            before = self.depth
            self._turn += 1
            self._num_counted = 0
            if self.depth != before:
                self.restart_settling()

    def differences(self) -> list[float]:
        """For each comparable pair, the logarithm of the ratio of step times, greater depth to smaller. Times are
        medians, relative to the usual time of their size. Sizes that did not occur at both depths are ignored."""
        by_size: dict[int, dict[int, list[float]]] = {}
        for _, depth, size, seconds in self._samples:
            by_size.setdefault(size, {}).setdefault(depth, []).append(log(seconds))
        usual = {
            size: mean(median(logs) for logs in of_size.values())
            for size, of_size in by_size.items()
            if len(of_size) == len(self._depths)
        }
        pairs: list[dict[int, list[float]]] = [{depth: [] for depth in self._depths} for _ in range(NUM_PAIRS)]
        for pair, depth, size, seconds in self._samples:
            if size in usual:
                pairs[pair][depth].append(log(seconds) - usual[size])
        low, high = self._depths
        return [median(pair[high]) - median(pair[low]) for pair in pairs if min(map(len, pair.values())) >= MIN_ALIKE]


class DepthDecision(NamedTuple):
    """The result of a round."""

    num_rows: int
    """The smallest batch size of the class."""
    depth: int
    """The choice from now on."""
    difference: float
    """Relative extra time of a step at the greater depth: 0.1 is 10 % longer, below 0 is shorter."""
    error: float
    """Its standard error; infinite if too few pairs were comparable."""

    def fields(self, depths: Depths) -> dict[str, float]:
        """For the log."""
        return {
            "rows": self.num_rows,
            "depth": self.depth,
            f"slower_at_{depths[1]}_percent": round(100 * self.difference, 1),
            "error_percent": round(100 * self.error, 1),
        }


class BatchClass:
    """The choice and the rounds of one class of batch sizes."""

    def __init__(self, size: int, choice: int, depths: Depths) -> None:
        self._num_rows = 4**size
        self._depths = depths
        self.choice = choice
        self.is_measured = False
        self.round: TuningRound | None = None
        self._num_until_round = WARMUP_STEPS
        self._num_between = MIN_BETWEEN

    @property
    def depth(self) -> int:
        return self.choice if self.round is None else self.round.depth

    def observe(self, num_rows: int, seconds: float) -> DepthDecision | None:
        """Learn from a step. Returns a decision if the step ends a round."""
        if self.round is None:
            self._num_until_round -= 1
            if self._num_until_round <= 0:
                self.round = TuningRound(self._depths)
            return None
        self.round.observe(num_rows, seconds)
        if not self.round.is_over:
            return None
        differences, self.round = self.round.differences(), None
        return self._decide(differences)

    def _decide(self, differences: list[float]) -> DepthDecision:
        num = len(differences)
        difference = mean(differences) if num else 0.0
        error = stdev(differences) / sqrt(num) if num > 1 else inf
        better = self.choice
        if abs(difference) > max(MARGIN, 2 * error):
            better = self._depths[difference <= 0]
        self.is_measured = self.is_measured or num > NUM_PAIRS // 2
        self._num_between = MIN_BETWEEN if better != self.choice else min(2 * self._num_between, MAX_BETWEEN)
        self.choice = better
        num_worse = NUM_PAIRS * (TURN_STEPS + SETTLING_STEPS)
        self._num_until_round = max(self._num_between, int(num_worse * expm1(abs(difference)) / MAX_COST))
        return DepthDecision(self._num_rows, better, expm1(difference), error)


class DepthTuner:
    """Chooses between two depths, starting with the smaller. Deterministic: it reads no clock."""

    def __init__(self, depths: Depths = DEPTHS) -> None:
        self.depths = depths
        self._classes: dict[int, BatchClass] = {}
        self._size = -2  # below any
        self.depth = depths[0]
        """How many steps to keep in flight now: the choice for the current batch size, or the depth being tried."""

    def observe(self, num_rows: int, seconds: float) -> DepthDecision | None:
        """Learn from a step that only decoded `num_rows` rows, was planned as soon as possible, and took `seconds` from
        the end of the previous step. Returns a decision if the step ends a round."""
        if num_rows <= 0 or seconds <= 0.0:
            return None
        size = self._size_of(num_rows)
        batch_class = self._classes.get(size)
        if batch_class is None:
            batch_class = self._classes[size] = BatchClass(size, self._choice_near(size), self.depths)
        if size != self._size:
            self._size = size
            if batch_class.round is not None and batch_class.depth != self.depth:
                batch_class.round.restart_settling()
        decision = batch_class.observe(num_rows, seconds)
        self.depth = batch_class.depth
        return decision

    def _size_of(self, num_rows: int) -> int:
        """The class of a batch size; the previous class while the size is near it."""
        if 0.75 * 4**self._size <= num_rows <= 1.25 * 4 ** (self._size + 1):
            return self._size
        return (num_rows.bit_length() - 1) // 2

    def _choice_near(self, size: int) -> int:
        """The choice of the nearest measured class; the smaller depth if there is none."""
        measured = [other for other, one in self._classes.items() if one.is_measured]
        if not measured:
            return self.depths[0]
        return self._classes[min(measured, key=lambda other: (abs(other - size), other))].choice

    @property
    def choices(self) -> dict[int, int]:
        """The chosen depth by the smallest batch size of each class."""
        return {4**size: one.choice for size, one in sorted(self._classes.items())}
