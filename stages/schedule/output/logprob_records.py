"""Logprob records on their way from the executor to detokenize: bytes that are divided among sequences. The scheduler
knows the width of a record and not its content (see pipeline/runtime/logprob_records.py).

The records that a step returns are noted when it is planned, because a row may hold another sequence when its result
comes.
"""

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Ids, Int64s
from pipeline.stages.schedule.output.output_buffer import OutputBuffer
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.steps.step_entries import ExpectedLogprobs, ExpectedPromptLogprobs, StepEntries


def expect_logprobs(rows: RowTracker, entries: StepEntries) -> ExpectedLogprobs | None:
    """The records that a step with these entries will return; None if no running request asks for any."""
    if not rows.all_flags & RowFlag.LOGPROBS:
        return None
    prompts = []
    widths = rows.prompt_record_bytes[entries.rows]
    for index in np.flatnonzero(widths).tolist():
        row, start = int(entries.rows[index]), int(entries.starts[index])
        # Position p returns the record of the next id.
        end = min(start + int(entries.counts[index]), int(rows.num_prompt[row]) - 1)
        sequence = rows.sequences[row]
        assert sequence is not None
        if start < end:
            prompts.append(ExpectedPromptLogprobs(row, sequence, start, end - start, int(widths[index])))
    return ExpectedLogprobs(rows.record_bytes[entries.rows[entries.samples]], prompts)


def take_records(
    rows: RowTracker,
    expected: ExpectedLogprobs,
    sampled: Int64s,
    ids: Ids,
    current: Bools,
    records: bytes,
    num_ids: Int64s | None = None,
) -> None:
    """Give the records of a step's samples to the sequences that still run in their rows. An id of -1 has no record.
    `num_ids` is how many ids each sample has, None for one each."""
    widths = expected.widths
    if num_ids is not None:
        widths, sampled, current = np.repeat(widths, num_ids), np.repeat(sampled, num_ids), np.repeat(current, num_ids)
    ends = np.cumsum(np.where(ids >= 0, widths, 0))
    assert (int(ends[-1]) if len(ends) else 0) == len(records), f"unexpected {len(records)} bytes of records"
    for index in np.flatnonzero((widths > 0) & (ids >= 0) & current).tolist():
        sequence = rows.sequences[int(sampled[index])]
        assert sequence is not None
        sequence.records += records[int(ends[index] - widths[index]) : int(ends[index])]


def take_prompt_records(
    rows: RowTracker, expected: ExpectedLogprobs, records: bytes, output_buffer: OutputBuffer
) -> None:
    """Pass on records that are new. A prompt that is computed again after a preemption returns its records again."""
    begin = 0
    for part in expected.prompts:
        data = records[begin : begin + part.num * part.width]
        begin += part.num * part.width
        if rows.sequences[part.row] is not part.sequence:
            continue  # it has finished or was preempted
        request = part.sequence.request
        num_known = request.num_prompt_records - part.start
        assert num_known >= 0, f"prompt records of request {request.request_id:x} are missing"
        if num_known < part.num:
            output_buffer.add_prompt_records(part.sequence, request.num_prompt_records, data[num_known * part.width :])
            request.num_prompt_records = part.start + part.num
    assert begin == len(records), f"{len(records)} bytes of prompt records came, {begin} were expected"
