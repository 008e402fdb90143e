"""Penalties on what has been said before, with vLLM's meaning (and OpenAI's, of the two that it has).

Costs are those of the known ids, and of one vector of zeros where repetitions are counted.
"""

import torch
from torch import Tensor


def penalize(
    logits: Tensor, ids: Tensor, num_prompt: int, repetition: float, presence: float, frequency: float
) -> None:
    """Change one row's logits [V] in place by the ids known so far: ids [n], `num_prompt` of the prompt and then the
    output's. Ids outside of the vocabulary, such as a picture's places, are passed over.

    The logit of an id that is among them is divided by `repetition` if it is above 0 and multiplied if not (Keskar et
    al., "CTRL", 2019, arXiv:1909.05858, mended for negative logits). Then `frequency` is subtracted for each time that
    the id is in the output, and `presence` once if it is there at all.
    """
    ids = ids.long()
    inside = (ids >= 0) & (ids < len(logits))
    # An id that is there several times is written several times, each time the same.
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
