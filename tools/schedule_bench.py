#!/usr/bin/env python3
"""What planning and settling a step costs the scheduler, by the number of decoding rows. No other process takes part.

    tools/schedule_bench.py                  1 to 1,024 rows, with prefix caching and without
    tools/schedule_bench.py 32 256 1024 --check
    tools/schedule_bench.py --depth 2 --json FILE

Rows decode side by side, each with room for all its ids. Their lengths are such that in ten steps of sixteen a tenth of
them gets a new block (and offers a full one to the prefix cache, a step before), and in six none does: rows that decode
for long cross a boundary every 16 steps, which is 6 % a step. Wall time of plan + settle in microseconds: median and
99th percentile of all steps, and medians of those in which no row crosses and in which a tenth does. "report" is the
message to detokenize that follows. Garbage is collected and frozen before, as in the stage.

--check: exit with 1 where the median with prefix caching is above 100, 250 and 800 µs for 32, 256 and 1,024 rows.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline import messages as m  # noqa: E402
from pipeline import option_types as types  # noqa: E402
from pipeline.config.load import ConfigError  # noqa: E402
from pipeline.out_file import require_writable, writing  # noqa: E402
from pipeline.stages.schedule.scheduler import Limits, Scheduler  # noqa: E402
from tools.figures.pairs import spread  # noqa: E402
from tools.figures.scheduler_alone import admission, answer  # noqa: E402

CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BOUNDS_US = {32: 100.0, 256: 250.0, 1024: 800.0}
NUM_STEPS = 320
WARMUP_STEPS = 32
BLOCK_SIZE = 16
SHORTEST = 20
NUM_GROUPS = 10
"""A tenth of the rows each; the rows of a group cross block boundaries together."""


class Cost(msgspec.Struct, frozen=True):
    """Of a step, in microseconds."""

    num_rows: int
    prefix_caching: bool
    p50: float
    p99: float
    none_cross: float
    """Median of steps in which no row gets a block."""
    tenth_crosses: float
    """Median of steps in which a tenth of the rows does; 0 where there are fewer than 10 rows."""
    report_p50: float


def measure(num_rows: int, prefix_caching: bool, depth: int = 1, num_steps: int = NUM_STEPS) -> Cost:
    """Run a scheduler of its own with so many rows."""
    num_ids = SHORTEST + NUM_GROUPS + WARMUP_STEPS + num_steps + 2 * depth
    scheduler = Scheduler(
        Limits(
            num_blocks=num_rows * -(-num_ids // BLOCK_SIZE) + num_rows,
            max_model_len=2048,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(4096, num_rows * (SHORTEST + NUM_GROUPS)),
            block_size=BLOCK_SIZE,
            prefix_caching=prefix_caching,
        )
    )
    for row in range(num_rows):
        length = SHORTEST + row % NUM_GROUPS
        scheduler.admit(admission(row + 1, np.arange(row, row + length, dtype=np.int32), num_ids))
    flight: deque[m.Step] = deque()
    everything: list[float] = []
    quiet: list[float] = []
    crossing: list[float] = []
    reports: list[float] = []
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
            scheduler.outgoing.report()
            scheduler.outgoing.reported()
            if turn >= WARMUP_STEPS:
                reports.append(time.perf_counter() - settled)
                everything.append(planned - begun + settled - answered)
                (crossing if step.block_rows else quiet).append(everything[-1])
    finally:
        gc.unfreeze()
    assert scheduler.num_running == num_rows, "a row ended or was preempted"
    p50, p99 = spread(everything)
    return Cost(
        num_rows,
        prefix_caching,
        1e6 * p50,
        1e6 * p99,
        1e6 * median(quiet or [0.0]),
        1e6 * median(crossing) if num_rows >= NUM_GROUPS and crossing else 0.0,
        1e6 * median(reports),
    )


def missed(costs: list[Cost]) -> list[str]:
    """Bounds that are not kept; one line each."""
    return [
        f"{cost.num_rows} rows take {cost.p50:.0f} µs a step, which should be at most {BOUNDS_US[cost.num_rows]:.0f}"
        for cost in costs
        if cost.prefix_caching and cost.p50 > BOUNDS_US.get(cost.num_rows, float("inf"))
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=types.positive, default=[], metavar="ROWS")
    parser.add_argument("--depth", type=int, choices=(1, 2), default=1, help="steps in flight; by default 1")
    parser.add_argument("--steps", type=types.positive, default=NUM_STEPS, help="by default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    args = parser.parse_args(arguments)
    try:
        if args.json:
            require_writable(Path(args.json), "--json")
        costs = []
        print("                      plan + settle, µs              ")
        print(" rows  caching     p50     p99   none cross   10 % cross   report")
        for num_rows in args.rows or CURVE:
            for prefix_caching in (False, True):
                cost = measure(num_rows, prefix_caching, args.depth, args.steps)
                costs.append(cost)
                print(
                    f"{num_rows:5}  {'on' if prefix_caching else 'off':7} {cost.p50:7.0f} {cost.p99:7.0f} "
                    f"{cost.none_cross:12.0f} {cost.tenth_crosses or float('nan'):12.0f} {cost.report_p50:8.0f}",
                    flush=True,
                )
        if args.json:
            with writing(Path(args.json), "--json"):
                Path(args.json).write_bytes(msgspec.json.encode(costs))
    except ConfigError as error:
        print(f"schedule_bench: error: {error}", file=sys.stderr)
        return 2
    for words in missed(costs):
        print(f"MISSED: {words}", file=sys.stderr)
    return 1 if args.check and missed(costs) else 0


if __name__ == "__main__":
    sys.exit(main())
