"""Predicts how long a step takes, learnt online from earlier steps. Pure; takes a few microseconds per step.

    seconds = a + b·D + c·C + d·T + e·P,   all coefficients at least 0

    D   decoding rows: rows that compute one position
    C   positions that these attend to, in total
    T   positions that the other rows compute, in chunks
    P   (query, key) pairs of the chunks: for `count` positions from `start` on, count · (start + count / 2)

The model minimizes the relative error over two memories:

- the last `WINDOW` steps, which show how fast the machine is now;
- the mean step of each kind ever observed (kinds are sizes of D, T and their contexts, by powers of 2 or 4). All kinds
  together have a small weight (`KEPT`), so they decide only what the last steps leave open: after an hour of decoding
  the model still knows what prefill costs, and under a constant load it does not drift among coefficients that explain
  the load equally well.

After an observation, one sweep of coordinate descent updates the coefficients, each kept at 0 or above. Its exact line
searches don't depend on the scales of the features, so there are none to choose. A sweep moves half way (`RELAXATION`):
that divides a shared effect among the coefficients instead of giving all of it to the first.

Outliers are clipped: a step that took far longer than its kind (another process had the core) counts as a little
longer. If several steps in a row are off in one direction, the machine has changed its speed: then all memory is
scaled, including kinds that were not computed lately.
"""

from math import sqrt

import numpy as np

from pipeline.stages.schedule.arrays import Float64s, Int64s

WINDOW = 128
"""Steps in the short memory."""
KIND_WINDOW = 16
"""Steps in the mean of a kind."""
KEPT = 0.05
"""Weight of all kinds together, relative to the last steps."""
RELAXATION = 0.5
NUM_EVERY_SWEPT = 64
"""After this many steps, only each fourth is followed by a sweep."""
MIN_CLIP = 0.25
"""Relative errors up to this, or up to four times the usual error, are not clipped."""
MAX_DEVIATION = 3.0
NUM_UNCLIPPED = 4
"""The first steps of a kind, which are not clipped."""
NUM_SAME_WAY = 6
"""Steps in a row, all too long or all too short by more than `MIN_CLIP`, that show a change of speed."""
MIN_S, MAX_S = 1e-9, 1e9
NUM_KNOWN = 8
"""Steps with chunks after which predictions for prefill are trusted."""
REFRESH = 8
"""How many steps of a kind pass between two updates of its mean in the sum over all kinds."""

Moments = list[float]
"""For features u of (a, b, c, d, e) and a target t: the 15 products u·u of the upper triangle by rows, then 5 u·t."""


class StepKindMean:
    """The mean step of one kind."""

    __slots__ = ("mean", "noted", "num")

    def __init__(self) -> None:
        self.num = 0
        self.mean = [0.0] * 5
        """D, C, T, P and seconds."""
        self.noted: Moments = [0.0] * 20
        """This kind's part in the sum over all kinds."""


class StepCostModel:
    """Learns from steps and predicts their time. Deterministic: the same steps give the same predictions.

    Before the first step every prediction is 0.0. Before the first step with chunks, chunks cost nothing: see
    `is_known`.
    """

    __slots__ = ("_deviations", "_kinds", "_last", "_num", "_num_chunks", "_off", "_sum", "coefficients")

    def __init__(self) -> None:
        self.coefficients = (0.0, 0.0, 0.0, 0.0, 0.0)
        """a in seconds, b per decoding row, c per position these attend to, d per chunk token, e per pair."""
        self._num = 0
        self._num_chunks = 0
        self._off: list[float] = []
        """Times of the last steps relative to their kinds, while all are off in one direction."""
        self._deviations = [0.1, 0.1]
        """The usual relative error of steps without chunks and with them."""
        self._last: Moments = [0.0] * 20
        self._kinds: dict[tuple[int, int, int], StepKindMean] = {}
        self._sum: Moments = [0.0] * 20

    @property
    def is_known(self) -> bool:
        """Whether the model has seen enough steps with chunks to predict their time."""
        return self._num_chunks >= NUM_KNOWN

    def predict(self, num_decodes: float, context: float, num_chunk_tokens: float, pairs: float) -> float:
        """Seconds that a step with these D, C, T and P takes; 0.0 before the first step."""
        a, b, c, d, e = self.coefficients
        return a + b * num_decodes + c * context + d * num_chunk_tokens + e * pairs

    def prefill_s(self, start: int, count: int) -> float:
        """Seconds that a chunk of `count` positions from `start` on adds to a step."""
        _, _, _, d, e = self.coefficients
        return d * count + e * count * (start + count / 2)

    def prefill_times_s(self, counts: Int64s) -> Float64s:
        """`prefill_s` of each of these counts from position 0 on."""
        _, _, _, d, e = self.coefficients
        return np.asarray(d * counts + e * counts * (counts / 2), np.float64)

    def max_chunk(self, budget_s: float, num_decodes: int, context: int, start: int, most: int) -> int:
        """The largest chunk from `start` on, at most `most` positions, with which a step of these decodes is predicted
        to take at most `budget_s`; 0 if even one position takes too long. If the step has chunks already, subtract
        their `prefill_s` from the budget first."""
        a, b, c, d, e = self.coefficients
        left = budget_s - (a + b * num_decodes + c * context)
        slope = d + e * start
        if left < 0 or most <= 0:
            return 0
        # e/2·n² + slope·n = left, solved without cancellation for small e
        divisor = slope + sqrt(slope * slope + 2 * e * left)
        count = most if 2 * left >= most * divisor else int(2 * left / divisor)
        # correct for rounding
        while count > 0 and self.predict(num_decodes, context, count, count * (start + count / 2)) > budget_s:
            count -= 1
        following = count + 1
        if following <= most and (
            self.predict(num_decodes, context, following, following * (start + following / 2)) <= budget_s
        ):
            return following
        return count

    def observe(
        self, num_decodes: float, context: float, num_chunk_tokens: float, pairs: float, seconds: float
    ) -> None:
        """Learn from a step. Steps with an impossible time are ignored."""
        if not MIN_S < seconds < MAX_S:
            return
        features = (float(num_decodes), float(context), float(num_chunk_tokens), float(pairs))
        kind = self._kind(*features)
        expected_s = self.predict(*features)
        if kind.num >= NUM_UNCLIPPED:
            seconds = self._clipped(expected_s, seconds, kind, num_chunk_tokens > 0)
        self._num += 1
        self._num_chunks += num_chunk_tokens > 0
        gain = 1 / min(self._num, WINDOW)
        moments = _moments(*features, seconds, max(expected_s, seconds))
        self._last = [old + gain * (new - old) for old, new in zip(self._last, moments, strict=True)]
        self._keep(kind, features, seconds)
        if self._num <= NUM_EVERY_SWEPT or self._num % 4 == 0:
            self._sweep()

    def _kind(self, num_decodes: float, context: float, num_chunk_tokens: float, pairs: float) -> StepKindMean:
        """The kind of such a step."""
        decodes, tokens = int(num_decodes), int(num_chunk_tokens)
        if tokens > 0:
            key = (decodes.bit_length() + 1 >> 1, tokens.bit_length(), int(pairs / tokens).bit_length() + 1 >> 1)
        else:
            key = (decodes.bit_length(), -1, int(context / decodes).bit_length() + 1 >> 1 if decodes else 0)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = StepKindMean()
        return kind

    def _clipped(self, expected_s: float, seconds: float, kind: StepKindMean, has_chunks: bool) -> float:
        """A step's time, clipped by the usual time of its kind."""
        num_decodes, context, num_chunk_tokens, pairs, mean_s = kind.mean
        mean_expected_s = self.predict(num_decodes, context, num_chunk_tokens, pairs)
        usual_s = mean_s * expected_s / mean_expected_s if mean_expected_s > 0 else mean_s
        if usual_s <= 0:
            return seconds
        ratio = seconds / usual_s
        error = ratio - 1
        usual = self._deviations[has_chunks]
        self._deviations[has_chunks] = usual + (min(abs(error), MAX_DEVIATION) - usual) / 16
        if kind.num >= KIND_WINDOW and self._has_changed(ratio):
            return seconds
        clip = max(MIN_CLIP, 4 * usual)
        return usual_s * (1 + min(max(error, -clip), clip))

    def _has_changed(self, ratio: float) -> bool:
        """Take a step's time relative to the usual time. If the machine has changed its speed, scale all memory and
        return True."""
        off = self._off
        if abs(ratio - 1) <= MIN_CLIP:
            off.clear()
            return False
        if off and (off[0] > 1) != (ratio > 1):
            off.clear()
        off.append(ratio)
        if len(off) < NUM_SAME_WAY:
            return False
        self._scale(sorted(off)[NUM_SAME_WAY // 2])
        off.clear()
        return True

    def _scale(self, factor: float) -> None:
        """Scale all memory as if every step had taken `factor` times as long."""
        self.coefficients = tuple(factor * each for each in self.coefficients)  # type: ignore[assignment]
        self._last = _scaled(self._last, factor)
        self._sum = _scaled(self._sum, factor)
        for kind in self._kinds.values():
            kind.mean[4] *= factor
            kind.noted = _scaled(kind.noted, factor)

    def _keep(self, kind: StepKindMean, features: tuple[float, float, float, float], seconds: float) -> None:
        """Add a step to its kind's mean, and now and then update the mean in the sum over all kinds."""
        kind.num += 1
        gain = 1 / min(kind.num, KIND_WINDOW)
        kind.mean = [old + gain * (new - old) for old, new in zip(kind.mean, (*features, seconds), strict=True)]
        if kind.num <= NUM_UNCLIPPED or kind.num % REFRESH == 0:
            num_decodes, context, num_chunk_tokens, pairs, mean_s = kind.mean
            scale_s = max(self.predict(num_decodes, context, num_chunk_tokens, pairs), mean_s)
            noted = kind.noted
            kind.noted = _moments(num_decodes, context, num_chunk_tokens, pairs, mean_s, scale_s)
            self._sum = [s + new - old for s, new, old in zip(self._sum, kind.noted, noted, strict=True)]

    def _sweep(self) -> None:
        """Move each coefficient in turn half way to its optimum, the others fixed."""
        share = KEPT / len(self._kinds)
        aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee, at, bt, ct, dt, et = [
            last + share * kept for last, kept in zip(self._last, self._sum, strict=True)
        ]
        a, b, c, d, e = self.coefficients
        if dd > 0:
            d = max(0.0, d + RELAXATION * (dt - ad * a - bd * b - cd * c - dd * d - de * e) / dd)
        if bb > 0:
            b = max(0.0, b + RELAXATION * (bt - ab * a - bb * b - bc * c - bd * d - be * e) / bb)
        if aa > 0:
            a = max(0.0, a + RELAXATION * (at - aa * a - ab * b - ac * c - ad * d - ae * e) / aa)
        if ee > 0:
            e = max(0.0, e + RELAXATION * (et - ae * a - be * b - ce * c - de * d - ee * e) / ee)
        if cc > 0:
            c = max(0.0, c + RELAXATION * (ct - ac * a - bc * b - cc * c - cd * d - ce * e) / cc)
        self.coefficients = (a, b, c, d, e)


def _moments(
    num_decodes: float, context: float, num_chunk_tokens: float, pairs: float, seconds: float, scale_s: float
) -> Moments:
    """The products of one step. Errors are in units of `scale_s`, the larger of the measured and the expected time, so
    that a step which was far too short does not dominate."""
    a, t = 1 / scale_s, seconds / scale_s
    b, c, d, e = num_decodes * a, context * a, num_chunk_tokens * a, pairs * a
    return [
        a * a, a * b, a * c, a * d, a * e, b * b, b * c, b * d, b * e, c * c, c * d, c * e, d * d, d * e, e * e,
        a * t, b * t, c * t, d * t, e * t,
    ]  # fmt: skip


def _scaled(moments: Moments, factor: float) -> Moments:
    """The moments of steps that took `factor` times as long. Errors are relative, so the targets stay and the features
    shrink."""
    return [moment / factor**2 for moment in moments[:15]] + [moment / factor for moment in moments[15:]]
