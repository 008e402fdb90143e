"""Launches of sums over ranks to compile."""

import torch

from pipeline.kernels.triton.all_reduce import MAX_PROGRAMS, one_shot_all_reduce, sum_partials


def launches() -> None:
    addresses, counts = torch.zeros(8, dtype=torch.int64), torch.zeros(MAX_PROGRAMS, dtype=torch.int32)
    out = torch.zeros(16, 4096)
    for num_partials, dtype in ((1, torch.bfloat16), (4, torch.float32)):
        partials = torch.zeros(num_partials, 16, 4096, dtype=dtype)
        sum_partials(out, partials)
        for num_ranks in (2, 8):
            one_shot_all_reduce(out, partials, addresses[:num_ranks], counts, 1)
