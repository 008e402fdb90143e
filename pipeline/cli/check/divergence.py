"""How far next-token distributions are from those of a reference. Shapes: P positions, V vocab_size."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.cli.check.cases import Logits

Doubles = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A summary of many positions. The divergences are in nats, from the reference: KL(reference || ours)."""

    num_positions: int
    top1: float
    """Share of positions whose most likely token is the reference's."""
    top1_error: float
    """Standard error of `top1`."""
    mean_kl: float
    kl_99: float
    """99 % quantile, interpolated linearly."""
    max_kl: float


@dataclass(slots=True)
class Divergence:
    """Collects positions."""

    kl: list[float] = field(default_factory=list)
    num_same: int = 0

    def add(self, reference: Logits, ours: Logits) -> None:
        """Compare two arrays of logits [P, V]. A position at which ours aren't finite counts as infinitely far."""
        for expected, found in zip(reference, ours, strict=True):
            if np.isfinite(found).all():
                self.kl.append(kl_divergence(expected, found))
                self.num_same += int(expected.argmax() == found.argmax())
            else:
                self.kl.append(float("inf"))

    def summary(self) -> Fidelity:
        """Of all positions so far, which are at least one."""
        num = len(self.kl)
        top1 = self.num_same / num
        values: Doubles = np.array(self.kl)
        return Fidelity(
            num_positions=num,
            top1=top1,
            top1_error=float(np.sqrt(top1 * (1 - top1) / max(num - 1, 1))),
            mean_kl=float(values.mean()),
            # Interpolation between infinities would be NaN.
            kl_99=float(np.quantile(values, 0.99)) if np.isfinite(values).all() else _quantile_with_inf(values),
            max_kl=float(values.max()),
        )


def kl_divergence(reference: Logits, ours: Logits) -> float:
    """KL(reference || ours) in nats, of the softmax of two rows of finite logits [V]. Computed in float64."""
    p, q = reference.astype(np.float64), ours.astype(np.float64)
    p -= p.max()
    q -= q.max()
    weights = np.exp(p)
    total = weights.sum()
    # sum(P * (log P - log Q)) with log P = p - log(sum(exp(p)))
    divergence = weights @ (p - q) / total - np.log(total) + np.log(np.exp(q).sum())
    return max(0.0, float(divergence))  # rounding may make it slightly negative


def _quantile_with_inf(values: Doubles) -> float:
    return float(np.quantile(values, 0.99, method="higher"))
