"""Judges the differences between our results and those of transformers.

Exact programs sum the same float32 numbers in another order. The others round activations, keys and values to bfloat16.
That difference is measured in standard deviations of the logits, because logits have no fixed scale. Outputs may differ
where transformers is undecided: where the logits of the two ids are no farther apart than the allowed difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.cli.check.cases import CheckPlan, Logits, Ours, Theirs

EXACT = 1e-4
"""Largest difference of a float32 logit, times the standard deviation of the logits if that is above 1."""
ROUNDED = 0.05
"""Largest root mean square difference of a row of logits with bfloat16 activations, in standard deviations of the
logits."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one way to compute the model."""

    program: str
    way: str
    num_rows: int
    """Rows of logits compared."""
    worst: float
    allowed: float
    """Allowed difference, in the same unit: that of the logits, or standard deviations."""
    is_share: bool
    num_texts: int
    num_same: int
    num_undecided: int
    """Outputs that diverge at a position where transformers is undecided."""

    @property
    def passed(self) -> bool:
        return self.worst <= self.allowed and self.num_same + self.num_undecided == self.num_texts


def judge(plan: CheckPlan, ours: Ours, theirs: Theirs) -> list[CheckResult]:
    """The results of each way to compute the model."""
    spread = float(np.mean([logits.std() for logits in theirs.logits.values()]))
    allowed = EXACT * max(1.0, spread) if ours.exact else ROUNDED
    undecided = 2 * allowed if ours.exact else 4 * allowed * spread
    findings = []
    for way, texts in ours.texts.items():
        rows = [made for made in ours.made if made.way == way]
        differences = [_difference(made.logits, theirs.logits[made.ids], ours.exact, spread) for made in rows]
        same = [text == expected for text, expected in zip(texts, theirs.texts, strict=True)]
        ties = [
            _is_tie(prompt, text, expected, theirs, undecided)
            for prompt, text, expected in zip(plan.prompts, texts, theirs.texts, strict=True)
        ]
        findings.append(
            CheckResult(
                program=ours.program,
                way=way,
                num_rows=len(rows),
                worst=max(differences),
                allowed=allowed,
                is_share=not ours.exact,
                num_texts=len(texts),
                num_same=sum(same),
                num_undecided=sum(tie and not equal for tie, equal in zip(ties, same, strict=True)),
            )
        )
    return findings


def _difference(ours: Logits, theirs: Logits, exact: bool, spread: float) -> float:
    """The difference in the unit of the bound; infinite if our logits have NaNs."""
    if not np.isfinite(ours).all():
        return float("inf")
    apart = np.abs(ours.astype(np.float64) - theirs)
    return float(apart.max()) if exact else float(np.sqrt((apart**2).mean()) / spread)


def _is_tie(
    prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], reference: Theirs, undecided: float
) -> bool:
    """Whether the two outputs diverge where transformers' logits of both ids are nearly equal."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return False
    logits = reference.logits.get((*prompt, *ours[:at]))
    return logits is not None and float(logits[theirs[at]] - logits[ours[at]]) <= undecided
