"""What planning and settling a step costs the scheduler, by the number of decoding rows. No other process takes part.

python tools/schedule_bench.py [ROWS ...]
"""

import sys
import time
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline import messages as m
from pipeline.stages.schedule.limits import Limits
from pipeline.stages.schedule.scheduler import Scheduler

NUM_STEPS = 200
WARMUP_STEPS = 20


def measure(num_rows: int) -> tuple[float, float, float]:
    """Median and 99th percentile of plan + settle, and median of a report, in seconds."""
    scheduler = Scheduler(
        Limits(num_blocks=num_rows * 64, max_model_len=2048, max_num_seqs=num_rows, max_num_batched_tokens=4096)
    )
    sampling = msgspec.Raw(msgspec.msgpack.encode(m.Sampling()))
    text = msgspec.Raw(msgspec.msgpack.encode(m.TextOptions()))
    for i in range(num_rows):
        prompt = np.arange(i, i + 20, dtype=np.int32).tobytes()
        scheduler.admit(m.Admit(i + 1, 1, 0, float(i), prompt, 1, 1000, sampling, text))
    steps, reports = [], []
    for turn in range(WARMUP_STEPS + NUM_STEPS):
        begun = time.perf_counter()
        step = scheduler.plan()
        planned = time.perf_counter()
        assert step is not None
        result = answer(scheduler, step)
        answered = time.perf_counter()
        scheduler.settle(result)
        settled = time.perf_counter()
        scheduler.outgoing.report()
        scheduler.outgoing.reported()
        if turn >= WARMUP_STEPS:
            steps.append(planned - begun + settled - answered)
            reports.append(time.perf_counter() - settled)
    return float(np.median(steps)), float(np.percentile(steps, 99)), float(np.median(reports))


def answer(scheduler: Scheduler, step: m.Step) -> m.StepResult:
    """What an executor would answer that always draws id 5."""
    assert isinstance(step.rows, bytes) and isinstance(step.samples, bytes)
    rows = np.frombuffer(step.rows, np.int32)[np.frombuffer(step.samples, np.uint8) > 0]
    return m.StepResult(
        incarnation=step.incarnation,
        step_id=step.step_id,
        rows=rows.tobytes(),
        generations=scheduler.rows.generation[rows].tobytes(),
        ids=np.full(len(rows), 5, np.int32).tobytes(),
        finishes=np.zeros(len(rows), np.uint8).tobytes(),
        compute_s=0.0,
        wait_s=0.0,
    )


if __name__ == "__main__":
    print("rows  plan + settle p50  p99  report p50   (µs)")
    for num_rows in map(int, sys.argv[1:] or ("32", "256", "1024")):
        p50, p99, report = (1e6 * value for value in measure(num_rows))
        print(f"{num_rows:5} {p50:17.0f} {p99:5.0f} {report:10.0f}")
