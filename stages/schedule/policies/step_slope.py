"""How the time of a decode step grows with the positions that it computes. Pure.

    seconds = mean + slope · (positions - mean positions)

The step cost model learns from all kinds of steps, and slowly. What speculation needs is the difference between a step
of D positions and one of D + k at this moment. So this is a regression over the last steps, with older ones forgotten
exponentially. Until the steps differ in their number of positions, the slope is that of a prompt's positions.
"""

WEIGHT = 1 / 32
"""Of the newest step."""
MIN_VARIANCE = 0.25
"""Of the number of positions, for a slope to be learnt."""
MAX_FACTOR = 2.0
"""A step that took longer than this, relative to its prediction, counts as this much: another process had the core."""


class StepSlope:
    """Learns from decode steps."""

    def __init__(self) -> None:
        self.num = 0
        self.slope_s = 0.0
        """Seconds for one position more; 0 before it was learnt."""
        self._mean_num = self._mean_s = self._variance = self._covariance = 0.0

    def observe(self, num_positions: int, seconds: float) -> None:
        """Learn from a step without prompts."""
        if self.num > 4:
            expected_s = self.predict(num_positions, self.slope_s)
            seconds = min(seconds, MAX_FACTOR * expected_s)
        self.num += 1
        weight = max(WEIGHT, 1 / self.num)
        off, off_s = num_positions - self._mean_num, seconds - self._mean_s
        self._mean_num += weight * off
        self._mean_s += weight * off_s
        self._variance = (1 - weight) * (self._variance + weight * off * off)
        self._covariance = (1 - weight) * (self._covariance + weight * off * off_s)
        if self._variance >= MIN_VARIANCE:
            self.slope_s = max(0.0, self._covariance / self._variance)

    def predict(self, num_positions: int, slope_s: float) -> float:
        """Seconds of a step of so many positions, with this slope; 0.0 before the first step."""
        if not self.num:
            return 0.0
        return max(self._mean_s / 8, self._mean_s + slope_s * (num_positions - self._mean_num))
