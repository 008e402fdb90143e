"""How many steps to keep in flight, found by trying: `schedule.depth = "auto"`. Pure.

At depth 1 the executor waits while the scheduler settles a result and plans the next step. At depth 2 the next step is
there when one ends, but it was planned beside that one, on cores that it may have needed. A GPU always waits at depth
1; there the question is whether steps are so short that it waits at depth 2 as well, where 3 costs those who come one
step more. Which costs less depends on machine, model and load, so now and then both are tried, in short turns, so that
what drifts (contexts grow) falls on both alike:

    1 2 │ 2 1 │ 1 2 │ 2 1 │ 1 2 │ 2 1      a round of six pairs; each digit is a turn of `TURN_STEPS` counted steps

Only like steps are compared: of as many rows, in which nothing but decoding was computed, and which were planned at
once, so that the executor did not wait for a request to come. Their times are from the end of the step before to their
own, by the clock of the device. Each pair says how much longer steps take at the greater depth. The mean over the pairs
decides where it is beyond `MARGIN` and beyond twice its standard error; else the choice stays.

Small and large batches may differ, so each class of numbers of rows (from 1, 4, 16, 64, … on) has its own choice and
rounds; numbers near the border of two belong to the class of before. A round is repeated after some thousands of steps
of the class; after more of them the oftener it has confirmed the choice and the more the worse depth costs, so that in
the long run rounds take less than `MAX_COST` of the time.
"""

from math import expm1, inf, log, log2, sqrt
from statistics import mean, median, stdev
from typing import NamedTuple

Depths = tuple[int, int]
"""The smaller and the greater of the two that are tried."""
DEPTHS: Depths = (1, 2)
GPU_DEPTHS: Depths = (2, 3)
NUM_PAIRS = 6
TURN_STEPS = 16
MIN_ALIKE = 4
"""Of a turn's steps, those that must be comparable for its pair to say something."""
SETTLING_STEPS = 3
"""Steps after a change of depth that are not counted: they were planned before it, or late because of it."""
WARMUP_STEPS = 64
"""Of a class, before its first round."""
MIN_BETWEEN = 4096
"""Counted steps of a class from one of its rounds to the next; doubled each time that the choice is confirmed."""
MAX_BETWEEN = 65536
MARGIN = 0.02
"""The choice changes for no less than this: relative time per step."""
MAX_COST = 0.01
MAX_ROUND_STEPS = 4 * len(DEPTHS) * NUM_PAIRS * (TURN_STEPS + SETTLING_STEPS)
"""A round that has not come to an end after so many steps of its class (their numbers of rows are never alike) is given
up."""


class TuningRound:
    """Some pairs of turns."""

    def __init__(self, depths: Depths = DEPTHS) -> None:
        self._depths = depths
        self.num_steps = 0
        self._turn = 0
        self._num_settling = SETTLING_STEPS
        self._num_counted = 0
        self._samples: list[tuple[int, int, int, float]] = []
        """Of counted steps: pair, depth, size and seconds. Of one size are those whose numbers of rows are alike."""

    @property
    def depth(self) -> int:
        """The depth of the turn that goes on."""
        pair, place = divmod(self._turn, 2)
        return self._depths[place ^ (pair & 1)]

    @property
    def is_over(self) -> bool:
        return self._turn >= 2 * NUM_PAIRS or self.num_steps >= MAX_ROUND_STEPS

    def unsettle(self) -> None:
        """Another depth was used in between."""
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
                self.unsettle()

    def differences(self) -> list[float]:
        """Of each pair that can be compared: the logarithm of the time at the greater depth over that at the
        smaller, as medians of steps in units of what is usual for their size. A size that was not there at both depths
        says nothing."""
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
    """What a round has shown."""

    num_rows: int
    """The smallest of its class."""
    depth: int
    """Chosen from now on."""
    difference: float
    """How much longer a step takes at the greater depth: 0.1 is a tenth; below 0 it takes less."""
    error: float
    """The standard error of that; infinite where too little could be compared."""


class BatchClass:
    """What is known of batches of about one size."""

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
        """Take in a step. Returns what it has decided, where it ends a round."""
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
    """Chooses between two depths. Begins with the smaller. Deterministic: it reads no clock."""

    def __init__(self, depths: Depths = DEPTHS) -> None:
        self.depths = depths
        self._classes: dict[int, BatchClass] = {}
        self._size = -2  # below any
        self.depth = depths[0]
        """How many steps to have in flight now: the choice for the batch as it is, or what is being tried."""

    def observe(self, num_rows: int, seconds: float) -> DepthDecision | None:
        """Take in a step that decoded `num_rows` rows and did nothing else, and that was planned as soon as there was
        something to plan: `seconds` from the end of the step before it to its own. Returns what has been decided, where
        this step ends a round."""
        if num_rows <= 0 or seconds <= 0.0:
            return None
        size = self._size_of(num_rows)
        one = self._classes.get(size)
        if one is None:
            one = self._classes[size] = BatchClass(size, self._choice_near(size), self.depths)
        if size != self._size:
            self._size = size
            if one.round is not None and one.depth != self.depth:
                one.round.unsettle()
        decision = one.observe(num_rows, seconds)
        self.depth = one.depth
        return decision

    def _size_of(self, num_rows: int) -> int:
        """The class of so many rows; the last one as long as they are near it."""
        if 0.75 * 4**self._size <= num_rows <= 1.25 * 4 ** (self._size + 1):
            return self._size
        return (num_rows.bit_length() - 1) // 2

    def _choice_near(self, size: int) -> int:
        """What the nearest class that has been measured has chosen; the smaller depth where there is none."""
        measured = [other for other, one in self._classes.items() if one.is_measured]
        if not measured:
            return self.depths[0]
        return self._classes[min(measured, key=lambda other: (abs(other - size), other))].choice

    @property
    def choices(self) -> dict[int, int]:
        """By the smallest number of rows of each class: the depth chosen for it."""
        return {4**size: one.choice for size, one in sorted(self._classes.items())}
