"""Judges the differences between our results and those of transformers.

Exact programs sum the same float32 numbers in another order, so their bound is a number. The others round keys and
values to bfloat16, and depending on the instruction set activations. How much of a model's logits that costs depends on
the model, so their bound is what it costs transformers: its own forward pass in bfloat16, of the same weights and ids.
It rounds the result of every operation. We round less, so we must not lose more, neither over all rows nor in the worst
row. The difference is measured in standard deviations of the logits, because logits have no fixed scale.

In a mixture of experts, rounding errors may change which experts compute a token whose router is nearly undecided. Then
its logits differ by tens of percent, in transformers' own bfloat16 as in ours, but in other rows. So there the median
over rows is compared, and the worst row must only be better than unrelated logits.

Outputs may differ where transformers is undecided: where the logits of the two ids are about as close as the allowed
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.cli.check.cases import CheckPlan, Logits, ProgramResults, ReferenceResults

EXACT = 1e-4
"""Largest difference of a float32 logit, times the standard deviation of the logits if that is above 1; of a model that
generates no text, times that of its row."""
UNRELATED = 1.5
"""The difference of unrelated logits, in standard deviations: what a row with other experts stays below."""
UNDECIDED = 4
"""Two ids are undecided if their logits are this many times the allowed difference apart: in bfloat16 both have errors,
and some rows more than the average."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one way to compute the model."""

    program: str
    way: str
    num_rows: int
    """Rows of logits compared."""
    difference: float
    """From transformers: the largest of an exact program's logits, or the root mean square of all others', in standard
    deviations; with experts the median over rows."""
    allowed: float
    worst: float
    """The difference of the worst row, in the same unit."""
    allowed_worst: float
    is_share: bool
    num_texts: int
    """0 if the model generates none."""
    num_same: int
    num_undecided: int
    """Outputs that diverge at a position where transformers is undecided."""

    @property
    def passed(self) -> bool:
        is_close = self.difference <= self.allowed and self.worst <= self.allowed_worst
        return is_close and self.num_same + self.num_undecided == self.num_texts


def judge(plan: CheckPlan, ours: ProgramResults, theirs: ReferenceResults) -> list[CheckResult]:
    """The results of each way to compute the model."""
    spread = float(np.mean([logits.std() for logits in theirs.logits.values()]))
    spread = spread or float(np.concatenate([*theirs.logits.values()]).std())  # one logit each: those of all rows
    findings = []
    for way, texts in ours.texts.items():
        rows = [made for made in ours.made if made.way == way]
        differences = [_difference(made.logits, theirs.logits[made.ids], ours.exact, spread) for made in rows]
        if ours.exact and not any(theirs.texts):
            # Vectors of some texts are many times as large as others, and so are their rounding errors.
            scales = [max(1.0, float(theirs.logits[made.ids].std())) for made in rows]
            differences = [one / scale for one, scale in zip(differences, scales, strict=True)]
            difference = max(differences)
            allowed = allowed_worst = undecided = EXACT
        elif ours.exact:
            difference, allowed = max(differences), EXACT * max(1.0, spread)
            allowed_worst = allowed
            undecided = 2 * allowed
        else:
            bounds = [_difference(theirs.bfloat16[made.ids], theirs.logits[made.ids], False, spread) for made in rows]
            difference, allowed = _root_mean_square(differences), _root_mean_square(bounds)
            allowed_worst = max(bounds)
            undecided = UNDECIDED * allowed * spread
            if ours.chooses_experts:
                difference, allowed = float(np.median(differences)), float(np.median(bounds))
                undecided = 2 * max(bounds) * spread  # both may have other experts
                allowed_worst = UNRELATED
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
                difference=difference,
                allowed=allowed,
                worst=max(differences),
                allowed_worst=allowed_worst,
                is_share=not ours.exact,
                num_texts=len(texts) if any(theirs.texts) else 0,
                num_same=sum(same) if any(theirs.texts) else 0,
                num_undecided=sum(tie and not equal for tie, equal in zip(ties, same, strict=True)),
            )
        )
    return findings


def _root_mean_square(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _difference(ours: Logits, theirs: Logits, exact: bool, spread: float) -> float:
    """The difference of a row, in the unit of its bound; infinite if it has NaNs."""
    if not np.isfinite(ours).all():
        return float("inf")
    apart = np.abs(ours.astype(np.float64) - theirs)
    return float(apart.max()) if exact else float(np.sqrt((apart**2).mean()) / spread)


def _is_tie(
    prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], reference: ReferenceResults, undecided: float
) -> bool:
    """Whether the two outputs diverge where transformers' logits of both ids are nearly equal."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return False
    logits = reference.logits.get((*prompt, *ours[:at]))
    return logits is not None and float(logits[theirs[at]] - logits[ours[at]]) <= undecided
