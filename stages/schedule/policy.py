"""Who runs, and how much: pure functions over counts."""

import numpy as np

from pipeline.stages.schedule.rows import Int64s


def grant(need: Int64s, budget: int) -> Int64s:
    """Divide a step's budget of tokens among rows.

    Args:
        need: int64 [rows], tokens each row could compute, oldest first.
        budget: tokens to hand out.

    Returns:
        int64 [rows], at most `need` each. Rows that need one token, the decoding ones, come first, so that a long
        prompt never stalls running streams; then the others by age. Their sum is at most `budget`.
    """
    decoding = need == 1
    if len(need) <= budget and decoding.all():
        return need  # nearly every step
    grants = decoding * (decoding.cumsum() <= budget)
    left = budget - int(grants.sum())
    chunks = need * ~decoding
    before = chunks.cumsum() - chunks
    grants = grants + (left - before).clip(0, chunks)
    return np.asarray(grants, np.int64)


def may_start(num_available: int, num_needed: int, num_running: int) -> bool:
    """Whether a sequence that needs `num_needed` more blocks may start beside `num_running` others.

    Every running row may cross a block boundary soon. A newcomer that takes their next blocks would be preempted for
    them a few steps later, and all that it had computed would be lost; so one block is left for each.
    """
    return num_available - num_needed >= num_running
