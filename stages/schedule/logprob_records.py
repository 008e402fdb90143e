"""What the executor tells of ids besides the ids, on its way through: bytes that are cut up by whose they are. What
they say is the matter of others (pipeline/runtime/logprob_records.py).

A step that is planned notes what it will tell, for until its result comes a row may be another's.
"""

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Ids, Int64s
from pipeline.stages.schedule.output_buffer import OutputBuffer
from pipeline.stages.schedule.rows import Rows
from pipeline.stages.schedule.step_entries import ExpectedLogprobs, ExpectedPromptLogprobs, StepEntries


def awaited(rows: Rows, entries: StepEntries) -> ExpectedLogprobs | None:
    """What a step with these entries will tell; None where nobody asks."""
    if not rows.num_recorded:
        return None
    prompts = []
    widths = rows.prompt_record_bytes[entries.rows]
    for place in np.flatnonzero(widths).tolist():
        row, start = int(entries.rows[place]), int(entries.starts[place])
        # Position p tells of the id behind it.
        end = min(start + int(entries.counts[place]), int(rows.num_prompt[row]) - 1)
        sequence = rows.sequences[row]
        assert sequence is not None
        if start < end:
            prompts.append(ExpectedPromptLogprobs(row, sequence, start, end - start, int(widths[place])))
    return ExpectedLogprobs(rows.record_bytes[entries.rows[entries.samples]], prompts)


def take_records(
    rows: Rows, awaited: ExpectedLogprobs, sampled: Int64s, ids: Ids, current: Bools, records: bytes
) -> None:
    """Give the records of a step's samples to the sequences that still run in their rows. `ids` has -1 where there is
    none, and no record either."""
    ends = np.cumsum(np.where(ids >= 0, awaited.widths, 0))
    assert (int(ends[-1]) if len(ends) else 0) == len(records), f"{len(records)} bytes of records came"
    for place in np.flatnonzero((awaited.widths > 0) & (ids >= 0) & current).tolist():
        sequence = rows.sequences[int(sampled[place])]
        assert sequence is not None
        sequence.records += records[int(ends[place] - awaited.widths[place]) : int(ends[place])]


def take_prompt_records(rows: Rows, awaited: ExpectedLogprobs, records: bytes, output_buffer: OutputBuffer) -> None:
    """Pass on those that are new: a prompt that is computed again tells its records again."""
    begin = 0
    for part in awaited.prompts:
        data = records[begin : begin + part.num * part.width]
        begin += part.num * part.width
        if rows.sequences[part.row] is not part.sequence:
            continue  # it has ended, or was put back
        request = part.sequence.request
        num_known = request.num_prompt_records - part.start
        assert num_known >= 0, f"records of request {request.request_id:x} are left out"
        if num_known < part.num:
            output_buffer.tell_prompt(part.sequence.seq, request.num_prompt_records, data[num_known * part.width :])
            request.num_prompt_records = part.start + part.num
    assert begin == len(records), f"{len(records)} bytes of prompt records came for {begin}"
