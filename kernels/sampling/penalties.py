"""Repetition, presence and frequency penalties, with vLLM's meaning (OpenAI has the latter two)."""

import torch
from torch import Tensor


def penalize(
    logits: Tensor, ids: Tensor, num_prompt: int, repetition: float, presence: float, frequency: float
) -> None:
    """Apply penalties to one row's logits [V] in place, for its ids [n]: `num_prompt` of the prompt, then the output's.
    Ids outside the vocabulary, such as image placeholders, are ignored.

    The logit of each of these ids is divided by `repetition` if it is above 0, else multiplied (Keskar et al., "CTRL",
    2019, arXiv:1909.05858, corrected for negative logits). Then `frequency` is subtracted for each time that the id is
    in the output, and `presence` once if it is there at all.
    """
    ids = ids.long()
    inside = (ids >= 0) & (ids < len(logits))
    # Repeated ids write the same value several times.
    if repetition != 1:
        known = ids[inside]
        values = logits[known]
        logits[known] = torch.where(values > 0, values / repetition, values * repetition)
    said = ids[num_prompt:][inside[num_prompt:]]
    changed = logits[said]
    if frequency != 0:
        counts = torch.zeros_like(logits).index_add_(0, said, torch.ones_like(changed))
        changed = changed - frequency * counts[said]
    logits[said] = changed - presence
