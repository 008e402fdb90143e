"""Token outputs on their way from the executor to detokenize: bytes that are divided among sequences. The scheduler
knows the width of a token output and not its content (see pipeline/runtime/token_outputs.py).

The token outputs that a step returns are noted when it is planned, because a row may hold another sequence when its
result comes."""

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Ids, Int64s
from pipeline.stages.schedule.output.output_buffer import OutputBuffer
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.steps.step_entries import ExpectedLogprobs, ExpectedPromptLogprobs, StepEntries


def expect_logprobs(rows: RowTracker, entries: StepEntries) -> ExpectedLogprobs | None:
    """The token outputs that a step with these entries will return; None if no running request asks for any."""
    if not rows.all_flags & RowFlag.LOGPROBS:
        return None
    prompts = []
    widths = rows.prompt_logprob_bytes[entries.rows]
    for index in widths.nonzero()[0].tolist():
        row, start = int(entries.rows[index]), int(entries.starts[index])
        # Position p returns the token output of the next id.
        end = min(start + int(entries.counts[index]), int(rows.num_prompt[row]) - 1)
        sequence = rows.sequences[row]
        assert sequence is not None
        if start < end:
            prompts.append(ExpectedPromptLogprobs(row, sequence, start, end - start, int(widths[index])))
    return ExpectedLogprobs(rows.token_output_bytes[entries.rows[entries.samples]], prompts)


def take_token_outputs(
    rows: RowTracker,
    expected: ExpectedLogprobs,
    sampled: Int64s,
    ids: Ids,
    current: Bools,
    token_outputs: bytes,
    num_ids: Int64s | None = None,
) -> None:
    """Give the token outputs of a step's samples to the sequences that still run in their rows. An id of -1 has no
    token output. `num_ids` is how many ids each sample has, None for one each."""
    widths = expected.widths
    if num_ids is not None:
        widths, sampled, current = np.repeat(widths, num_ids), np.repeat(sampled, num_ids), np.repeat(current, num_ids)
    ends = np.where(ids >= 0, widths, 0).cumsum()
    assert (int(ends[-1]) if len(ends) else 0) == len(token_outputs), (
        f"unexpected {len(token_outputs)} bytes of token outputs"
    )
    for index in ((widths > 0) & (ids >= 0) & current).nonzero()[0].tolist():
        sequence = rows.sequences[int(sampled[index])]
        assert sequence is not None
        sequence.token_outputs += token_outputs[int(ends[index] - widths[index]) : int(ends[index])]


def take_prompt_logprobs(
    rows: RowTracker, expected: ExpectedLogprobs, logprobs: bytes, output_buffer: OutputBuffer
) -> None:
    """Pass on token outputs that are new. A prompt that is computed again after a preemption returns its token
    outputs again."""
    begin = 0
    for part in expected.prompts:
        data = logprobs[begin : begin + part.num * part.width]
        begin += part.num * part.width
        if rows.sequences[part.row] is not part.sequence:
            continue  # it has finished or was preempted
        request = part.sequence.request
        num_known = request.num_known_prompt_logprobs - part.start
        assert num_known >= 0, f"prompt logprobs of request {request.request_id:x} are missing"
        if num_known < part.num:
            output_buffer.add_prompt_logprobs(
                part.sequence, request.num_known_prompt_logprobs, data[num_known * part.width :]
            )
            request.num_known_prompt_logprobs = part.start + part.num
    assert begin == len(logprobs), f"{len(logprobs)} bytes of prompt logprobs came, {begin} were expected"
