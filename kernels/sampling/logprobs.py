"""Logprobs in torch: the log probability of an id, and the top ids with theirs. In C++: kernels/cpu/logprobs.h.

Shapes: N rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.row_by_row import row_by_row
from pipeline.kernels.sampling.logprob_inputs import LogprobInputs
from pipeline.kernels.step_inputs import IntArray


def log_softmax(logits: Tensor) -> Tensor:
    """The log-softmax of logits [N, V], float64. NaN has probability 0. If the largest logit is infinite, 0 for its ids
    and -inf for others; never NaN."""
    wide = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top = wide.amax(dim=-1, keepdim=True)
    below = wide - top
    logprobs = below - below.exp().sum(dim=-1, keepdim=True).log()
    return torch.where(top.isfinite(), logprobs, torch.where(wide == top, 0.0, -torch.inf))


def likeliest(logits: Tensor, num: int) -> Tensor:
    """The `num` likeliest ids of one row [V], likeliest first, ties by id; NaN counts as -inf. `num` is at most V.
    Returns [num] int64. Only these are sorted."""
    clean = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if not num:
        return torch.zeros(0, dtype=torch.int64)
    candidates = (clean >= clean.topk(num).values[-1]).nonzero()[:, 0]
    order = clean[candidates].argsort(descending=True, stable=True)
    return candidates[order][:num]


def write_logprobs(logits: Tensor, ids: IntArray, logprobs: LogprobInputs) -> None:
    """Write the requested records: logits [N, V]; ids [N], where those below 0 have none."""
    asking = np.flatnonzero((logprobs.addresses[: len(ids)] != 0) & (ids >= 0))
    if not len(asking):
        return
    rows = logits[torch.from_numpy(asking).to(logits.device)]
    values = row_by_row(log_softmax, rows).float().cpu()
    for index, i in enumerate(asking.tolist()):
        logprob, top_ids, top_logprobs = logprobs.views(i)
        given = logprobs.given(i)
        if given is None:
            top = likeliest(rows[index], min(len(top_ids), rows.shape[1])).cpu()
        else:
            top = torch.from_numpy(given.astype(np.int64))
        num = len(top)
        logprob[0] = values[index, ids[i]]
        top_ids[:num], top_ids[num:] = top.numpy(), -1
        top_logprobs[:num], top_logprobs[num:] = values[index, top].numpy(), -np.inf
