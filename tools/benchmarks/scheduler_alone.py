"""The scheduler without its process, with a fake executor that always samples the same id."""

import time
from collections import deque

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

SAMPLED_ID = 5
VOCAB_SIZE = 32000


def answer(scheduler: Scheduler, step: m.Step) -> m.StepResult:
    """The executor's answer to a step."""
    assert isinstance(step.rows, bytes) and isinstance(step.samples, bytes)
    rows = np.frombuffer(step.rows, np.int32)[np.frombuffer(step.samples, np.uint8) > 0]
    return m.StepResult(
        incarnation=step.incarnation,
        step_id=step.step_id,
        rows=rows.tobytes(),
        generations=scheduler.rows.generation[rows].tobytes(),
        ids=np.full(len(rows), SAMPLED_ID, np.int32).tobytes(),
        finishes=np.zeros(len(rows), np.uint8).tobytes(),
        compute_s=0.0,
        wait_s=0.0,
    )


def admission(number: int, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", num_output: int) -> m.Admit:
    """A request with one sequence. Lower numbers are older."""
    options = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions(max_tokens=num_output)))
    return m.Admit(number, 1, 0, float(number), prompt.tobytes(), options)


def request_cost(
    caching: bool,
    num_requests: int,
    num_rows: int,
    num_prompt: int,
    num_output: int,
    num_blocks: int,
    seed: int,
) -> float:
    """CPU time in seconds that the scheduler spends on a request: admission, its share of plans and settlements, and
    its close. `num_rows` requests run at a time, with random prompts. The first `num_rows` fill the rows and the pool
    and are not counted, nor is work of the executor and the gateway."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=2048,
            max_num_seqs=num_rows,
            max_num_batched_tokens=96,
            prefix_caching=caching,
        )
    )
    rng = np.random.default_rng(seed)
    prompts = deque(rng.integers(0, VOCAB_SIZE, num_prompt, np.int32) for _ in range(num_requests + num_rows))
    open_ids: set[int] = set()
    number, num_closed, spent_s = 0, 0, 0.0
    while prompts or open_ids:
        begun = time.process_time_ns()
        while prompts and len(open_ids) < num_rows:
            number += 1
            scheduler.admit(admission(number, prompts.popleft(), num_output))
            open_ids.add(number)
        step = scheduler.plan()
        spent_ns = time.process_time_ns() - begun
        assert step is not None, "there is work, but no step to do it"
        result = answer(scheduler, step)
        begun = time.process_time_ns()
        scheduler.settle(result)
        scheduler.output_buffer.pending()
        scheduler.output_buffer.mark_sent()
        for request_id in [one for one in open_ids if not scheduler.requests[one].open_sequences]:
            scheduler.close(m.Closed(request_id, 1))
            open_ids.remove(request_id)
            num_closed += 1
        spent_ns += time.process_time_ns() - begun
        if num_closed >= num_rows:
            spent_s += 1e-9 * spent_ns
    return spent_s / num_requests
