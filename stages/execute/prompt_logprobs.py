"""Records of a prompt's own ids, by what the model makes of the ids before them.

They are computed behind a step, from the hidden states that it has left, only where a row asks: logits of all positions
have no room, and a step whose rows don't ask has none of it in its program. So it is the last norm and the head once
more, for as many positions at a time as there is room for rows of logits.
"""

import numpy as np

from pipeline.kernels.logprob_inputs import ByteArray, ScoreInputs
from pipeline.kernels.step_inputs import IntArray, LongArray, StepInputs
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.rows import RowTable
from pipeline.stages.execute.sampling_features import SamplingFeature

NO_BYTES: ByteArray = np.zeros(0, np.uint8)
NO_PLACES: LongArray = np.zeros(0, np.int64)
NO_IDS: IntArray = np.zeros(0, np.int32)


def score_prompts(
    table: RowTable, rows: IntArray, program: Program, inputs: StepInputs, scores: ScoreInputs
) -> ByteArray:
    """The records of the ids behind each position that a step of these rows has computed, as far as they are the
    prompt's; of the entries that ask for them, in order."""
    num = len(rows)
    places, ids, num_top = prompt_places(table, rows, inputs.starts[:num], inputs.counts[:num], inputs.offsets[:num])
    if not len(places):
        return NO_BYTES
    parts = []
    for begin in range(0, len(places), inputs.max_num_rows):
        piece = slice(begin, begin + inputs.max_num_rows)
        scores.fill(places[piece], ids[piece], num_top[piece])
        program.score()
        parts.append(scores.logprobs.memory)
    return np.concatenate(parts)


def prompt_places(
    table: RowTable, rows: IntArray, starts: IntArray, counts: IntArray, offsets: IntArray
) -> tuple[LongArray, IntArray, IntArray]:
    """Of the entries that ask, parallel arrays: the tokens of the batch whose logits tell of an id of the prompt, that
    id, and how many of the likeliest there are to be with it."""
    places: list[LongArray] = [NO_PLACES]
    ids: list[IntArray] = [NO_IDS]
    num_top: list[IntArray] = [NO_IDS]
    for i in np.flatnonzero(table.features[rows] & SamplingFeature.PROMPT_LOGPROBS).tolist():
        row, start = int(rows[i]), int(starts[i])
        num = min(int(counts[i]), int(table.num_prompt[row]) - 1 - start)
        if num > 0:
            places.append(int(offsets[i]) + np.arange(num))
            ids.append(table.ids[row, start + 1 : start + 1 + num])
            num_top.append(np.full(num, table.prompt_num_top[row], np.int32))
    return np.concatenate(places), np.concatenate(ids), np.concatenate(num_top)
