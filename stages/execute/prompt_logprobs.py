"""Prompt logprobs: the log probability of each prompt token given the tokens before it.

They are computed after a step, from its hidden states, and only for rows that request them. The logits of all positions
do not fit into memory, so the last norm and the head run again, for as many positions at a time as there are rows of
logits.
"""

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import ByteArray
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature

NO_BYTES: ByteArray = np.zeros(0, np.uint8)
NO_INDICES: LongArray = np.zeros(0, np.int64)
NO_IDS: IntArray = np.zeros(0, np.int32)


def prompt_token_indices(
    table: RowTable, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray
) -> tuple[LongArray, IntArray, IntArray]:
    """For the entries that request prompt logprobs, parallel arrays: the index of each token in the batch, the prompt
    id that follows it, and the number of top logprobs."""
    indices: list[LongArray] = [NO_INDICES]
    ids: list[IntArray] = [NO_IDS]
    num_top: list[IntArray] = [NO_IDS]
    for i in np.flatnonzero(table.features[rows] & SamplingFeature.PROMPT_LOGPROBS).tolist():
        row, start = int(rows[i]), int(starts[i])
        num = min(int(counts[i]), int(table.num_prompt[row]) - 1 - start)
        if num > 0:
            indices.append(int(offsets[i]) + np.arange(num))
            ids.append(table.ids[row, start + 1 : start + 1 + num])
            num_top.append(np.full(num, table.num_prompt_logprobs[row], np.int32))
    return np.concatenate(indices), np.concatenate(ids), np.concatenate(num_top)
