#!/usr/bin/env python3
"""Measures the scheduler's time to plan and settle a step, by the number of decoding rows, in one process.

    tools/part_bench/schedule.py                  1 to 1,024 rows, with prefix caching and without
    tools/part_bench/schedule.py 32 256 1024 --check
    tools/part_bench/schedule.py --depth 2 --json FILE

All rows decode, and none is preempted. Wall time of plan + settle in microseconds: median and 99th percentile of steps
of rows with evenly spread lengths, so that in each step a sixteenth of the rows gets a new block and a sixteenth adds a
full one to the prefix cache, as in long decoding. Then, in a separate run, a tenth of the rows crosses a block boundary
in each of ten steps, and none in the next six: the medians of both kinds of steps. "report" is the message to
detokenize that follows. Garbage is collected and frozen before, as in the stage.

--check: exit with 1 if the median with prefix caching is above 100, 250 and 800 µs for 32, 256 and 1,024 rows.
"""

import argparse
import gc
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.cli import option_types as types  # noqa: E402
from pipeline.cli.out_file import require_writable, write_output, writing  # noqa: E402
from pipeline.config.load import ConfigError  # noqa: E402
from pipeline.runtime import messages as m  # noqa: E402
from pipeline.stages.schedule.scheduler import Scheduler  # noqa: E402
from pipeline.stages.schedule.scheduler_config import SchedulerConfig  # noqa: E402
from tools.benchmarks.pairs import spread  # noqa: E402
from tools.benchmarks.scheduler_alone import admission, answer  # noqa: E402

CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BOUNDS_US = {32: 100.0, 256: 250.0, 1024: 800.0}
NUM_STEPS = 320
WARMUP_STEPS = 32
BLOCK_SIZE = 16
SHORTEST = 20
NUM_GROUPS = 10
"""The rows of a group, a tenth of all, cross block boundaries together."""


class StepCost(msgspec.Struct, frozen=True):
    """Times of a step in microseconds; 0 if there are too few rows."""

    num_rows: int
    prefix_caching: bool
    p50: float
    p99: float
    none_cross: float
    """Median of steps in which no row gets a block."""
    tenth_crosses: float
    """Median of steps in which a tenth of the rows gets one."""
    report_p50: float


class StepTimings(msgspec.Struct):
    """Measured times in seconds, one per step."""

    crossing: list[float] = []
    """Plan + settle of steps in which some row gets a block; `quiet` has the others."""
    quiet: list[float] = []
    reports: list[float] = []


def measure(num_rows: int, prefix_caching: bool, depth: int = 1, num_steps: int = NUM_STEPS) -> StepCost:
    """Measure schedulers with `num_rows` rows."""
    evenly = times_of(num_rows, prefix_caching, depth, num_steps, BLOCK_SIZE)
    tenths = (
        times_of(num_rows, prefix_caching, depth, num_steps, NUM_GROUPS) if num_rows >= NUM_GROUPS else StepTimings()
    )
    p50, p99 = spread(evenly.crossing + evenly.quiet)
    none_cross, tenth_crosses, report_p50 = (
        1e6 * median(times or [0.0]) for times in (tenths.quiet, tenths.crossing, evenly.reports)
    )
    return StepCost(num_rows, prefix_caching, 1e6 * p50, 1e6 * p99, none_cross, tenth_crosses, report_p50)


def times_of(num_rows: int, prefix_caching: bool, depth: int, num_steps: int, num_groups: int) -> StepTimings:
    """Measure a new scheduler whose rows have `num_groups` consecutive lengths."""
    num_output = WARMUP_STEPS + num_steps + 2 * depth
    longest = SHORTEST + num_groups
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_rows * (-(-(longest + num_output) // BLOCK_SIZE) + 1),
            max_model_len=2048,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(4096, num_rows * longest),
            block_size=BLOCK_SIZE,
            prefix_caching=prefix_caching,
        )
    )
    for row in range(num_rows):
        prompt = np.arange(row, row + SHORTEST + row % num_groups, dtype=np.int32)
        scheduler.admit(admission(row + 1, prompt, num_output))
    flight: deque[m.Step] = deque()
    times = StepTimings()
    gc.collect()
    gc.freeze()
    try:
        for turn in range(WARMUP_STEPS + num_steps):
            begun = time.perf_counter()
            step = scheduler.plan()
            planned = time.perf_counter()
            assert step is not None, "there is work, but no step to do it"
            flight.append(step)
            if len(flight) < depth:
                continue
            result = answer(scheduler, flight.popleft())
            answered = time.perf_counter()
            scheduler.settle(result)
            settled = time.perf_counter()
            scheduler.output_buffer.pending()
            scheduler.output_buffer.mark_sent()
            if turn >= WARMUP_STEPS:
                times.reports.append(time.perf_counter() - settled)
                (times.crossing if step.block_rows else times.quiet).append(planned - begun + settled - answered)
    finally:
        gc.unfreeze()
    assert scheduler.num_running == num_rows, "a row ended or was preempted"
    return times


def missed(costs: list[StepCost]) -> list[str]:
    """One line for each bound that is exceeded."""
    return [
        f"{cost.num_rows} rows take {cost.p50:.0f} µs a step, the bound is {BOUNDS_US[cost.num_rows]:.0f}"
        for cost in costs
        if cost.prefix_caching and cost.p50 > BOUNDS_US.get(cost.num_rows, float("inf"))
    ]


def shown(value: float) -> str:
    return f"{value:.0f}" if value else "–"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=types.positive, default=[], metavar="ROWS")
    parser.add_argument("--depth", type=int, choices=(1, 2), default=1, help="steps in flight; by default 1")
    parser.add_argument("--steps", type=types.positive, default=NUM_STEPS, help="by default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is exceeded")
    args = parser.parse_args(arguments)
    try:
        if args.json:
            require_writable(Path(args.json), "--json")
        costs = []
        print("plan + settle, µs")
        print(" rows  caching     p50     p99   none cross   10 % cross   report")
        for num_rows in args.rows or CURVE:
            for prefix_caching in (False, True):
                cost = measure(num_rows, prefix_caching, args.depth, args.steps)
                costs.append(cost)
                print(
                    f"{num_rows:5}  {'on' if prefix_caching else 'off':7} {cost.p50:7.0f} {cost.p99:7.0f} "
                    f"{shown(cost.none_cross):>12} {shown(cost.tenth_crosses):>12} {cost.report_p50:8.0f}",
                    flush=True,
                )
        if args.json:
            with writing(Path(args.json), "--json"):
                write_output(Path(args.json), msgspec.json.encode(costs))
    except ConfigError as error:
        print(f"schedule_bench: error: {error}", file=sys.stderr)
        return 2
    for words in missed(costs):
        print(f"MISSED: {words}", file=sys.stderr)
    return 1 if args.check and missed(costs) else 0


if __name__ == "__main__":
    sys.exit(main())
