"""Samples ids from logits.

It uses the Gumbel-max trick (Maddison, Tarlow and Minka, 2014, arXiv:1411.0030): with exponential noise e, the id with
the largest `logit / temperature - log(e)` wins with the probability of the softmax. Rounding in the logits changes the
winner only if two are almost equal. A row's numbers come from calls of their own, so its id is the same in any batch.

Filters come in vLLM's order: temperature, min_p, top_k, top_p, each applied to the ids that the previous one keeps.
Each cuts everything below some logit, so together they are one threshold per row; equal logits stay or go together.

Shapes: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from pipeline.kernels.sampling.noise import exponential

WIDTHS = (256, 4096)
"""Number of a row's largest logits to sort for a threshold; if these are not enough, all are sorted."""


def argmax(logits: Tensor) -> Tensor:
    """The greedy ids: logits [N, V]; returns [N] int64."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """Sample one id per row: logits [N, V]; temperature [N], above 0; top_k [N] int64, 0 is off; top_p [N] in (0, 1], 1
    is off; min_p [N] in [0, 1], 0 is off; keys [N, 2] from `halves`. Returns [N] int64."""
    if len(logits) != 1:
        whole = logits, temperature, top_k, top_p, min_p, keys
        rows = [sample(*(tensor[i : i + 1] for tensor in whole)) for i in range(len(logits))]
        return torch.cat(rows) if rows else top_k
    # Relative to the largest, so that no temperature gives an infinite logit.
    scaled = logits.float()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if bool(filtered.any()):
        floor = torch.full_like(temperature, -torch.inf)
        floor[filtered] = thresholds(scaled[filtered], top_k[filtered], top_p[filtered], min_p[filtered])
        scaled.masked_fill_(scaled < floor[:, None], -torch.inf)
    return scaled.sub_(exponential(keys, scaled.shape[1]).log_()).argmax(dim=-1)


def thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest value that each row keeps. scaled [N, V] with 0 as each row's largest value; returns [N]."""
    vocab_size = scaled.shape[1]
    # log(0) is -inf: nothing is cut.
    floor = torch.log(min_p)
    limited = top_k.clamp(max=vocab_size)
    largest_k = int(limited.max())
    if largest_k > 0:
        largest = scaled.topk(largest_k, dim=-1).values
        kth = largest.gather(1, (limited - 1).clamp(min=0)[:, None])[:, 0]
        floor = torch.where(limited > 0, torch.maximum(floor, kth), floor)
    nucleus = top_p < 1
    if bool(nucleus.any()):
        floor[nucleus] = _nucleus(scaled[nucleus], floor[nucleus], top_p[nucleus])
    return floor


def _nucleus(scaled: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """The smallest of the fewest largest values that have `top_p` of the probability above `floor`."""
    weights = torch.exp(scaled).masked_fill_(scaled < floor[:, None], 0)
    wanted = weights.sum(dim=-1, dtype=torch.float64) * top_p
    result = torch.empty_like(floor)
    rows = torch.arange(len(floor), device=floor.device)
    for width in (*WIDTHS, scaled.shape[1]):
        values = scaled[rows].topk(min(width, scaled.shape[1]), dim=-1).values
        sorted_weights = torch.exp(values).masked_fill_(values < floor[rows, None], 0)
        cumulative = sorted_weights.cumsum(dim=-1, dtype=torch.float64)
        # A value is kept if the larger ones don't have enough yet.
        kept = ((cumulative - sorted_weights) < wanted[rows, None]).logical_and_(sorted_weights > 0)
        num_kept = kept.sum(dim=-1).clamp(min=1)
        result[rows] = values.gather(1, num_kept[:, None] - 1)[:, 0]
        rows = rows[cumulative[:, -1] < wanted[rows]]
        if not len(rows):
            break
    return result


def probabilities_reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution of `sample`, by definition and in float64. logits [V]; returns [V]."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    if min_p > 0:
        probabilities[probabilities < min_p * probabilities.max()] = 0
    if 0 < top_k < len(logits):
        probabilities[probabilities < probabilities.sort(descending=True).values[top_k - 1]] = 0
    probabilities /= probabilities.sum()
    if top_p < 1:
        held = 0.0
        for value in probabilities.sort(descending=True).values.tolist():
            if held >= top_p:
                break
            held, smallest = held + value, value
        probabilities[probabilities < smallest] = 0
    return probabilities / probabilities.sum()
