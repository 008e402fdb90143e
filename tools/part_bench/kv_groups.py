"""What KV groups save and cost: `python -m tools.part_bench.kv_groups MODEL`, for a model that mixes windows and full
attention.

    sequences   the most that run at once, by KV memory: the scheduler alone, with the plan of this model's memory and
                60 requests with prompts of 2,000 tokens and 32 to 600 tokens of output
    planner     its median time to plan and settle a step of 16 and of 256 rows behind prompts of 600 tokens
    --decode    the executor's median time for a decode step of 16 such rows and of one, of two runners that take turns

Each with `execute.kv_groups` and without.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.kv import plan_kv
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.stages.execute.pair import Pair, Request
from tools.benchmarks.scheduler_alone import admission, answer

MIB = 2**20
KV_MIB = (64, 128)
NUM_REQUESTS, LONG_PROMPT, MAX_OUTPUT = 60, 2000, 600
PROMPT, NUM_STEPS, WARMUP = 600, 200, 20
DECODE_STEPS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `pipeline serve --model`")
    parser.add_argument("--decode", action="store_true", help="also measure the executor")
    args = parser.parse_args()
    folder = prepare(Settings(model=args.model))
    config = ModelConfig.load(folder)
    print("                                 with groups   without")
    for mib in KV_MIB:
        print(_row(f"sequences in {mib} MiB", [_most_sequences(config, mib, divides) for divides in (True, False)]))
    for num_rows in (16, 256):
        made = [f"{_plan_us(config, num_rows, divides):.0f} µs" for divides in (True, False)]
        print(_row(f"planner, {num_rows} rows", made))
    for num_rows in (16, 1) if args.decode else ():
        print(_row(f"decode, {num_rows} rows", [f"{ms:.1f} ms" for ms in _decode_ms(folder, num_rows)]))
    return 0


def _row(name: str, cells: Sequence[object]) -> str:
    return f"{name:30}  {cells[0]!s:>12}  {cells[1]!s:>8}"


def settings_of(mib: int, *, divides: bool, max_num_seqs: int = 64) -> Settings:
    """Settings with this KV memory."""
    execute = ExecuteSettings(kv_cache_bytes=mib * MIB, hybrid_kv_cache_manager=divides)
    return Settings(execute=execute, schedule=ScheduleSettings(max_num_seqs=max_num_seqs))


def _limits(config: ModelConfig, settings: Settings) -> SchedulerConfig:
    plan = plan_kv(settings, config, settings.schedule.max_step_tokens)
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=settings.schedule.max_num_seqs,
        max_num_batched_tokens=settings.schedule.max_num_batched_tokens,
        kv_groups=tuple(plan.layout.groups),
    )


def _most_sequences(config: ModelConfig, mib: int, divides: bool) -> int:
    scheduler = Scheduler(_limits(config, settings_of(mib, divides=divides)))
    random = np.random.default_rng(5)
    for number in range(NUM_REQUESTS):
        prompt = random.integers(0, config.vocab_size, LONG_PROMPT, np.int32)
        scheduler.admit(admission(number + 1, prompt, int(random.integers(32, MAX_OUTPUT + 1))))
    most = 0
    while (step := scheduler.plan()) is not None:
        most = max(most, scheduler.num_running)
        scheduler.settle(answer(scheduler, step))
        scheduler.output_buffer.pending()
        scheduler.output_buffer.mark_sent()
    return most


def _plan_us(config: ModelConfig, num_rows: int, divides: bool) -> float:
    settings = settings_of(64, divides=divides, max_num_seqs=num_rows)
    limits = _limits(config, settings)
    longest = PROMPT + NUM_STEPS + WARMUP + 2 * BLOCK_SIZE
    groups: tuple[KVGroup, ...] = limits.kv_groups
    limits = msgspec.structs.replace(
        limits,
        num_blocks=num_rows * (len(groups) * (longest // BLOCK_SIZE + 2)),
        max_num_batched_tokens=num_rows * longest,
        max_model_len=2 * longest,
        prefix_caching=False,
    )
    scheduler = Scheduler(limits)
    for row in range(num_rows):
        prompt = np.arange(row, row + PROMPT + row % BLOCK_SIZE, dtype=np.int32)
        scheduler.admit(admission(row + 1, prompt, NUM_STEPS + 2 * WARMUP))
    times = []
    gc.collect()
    gc.freeze()
    for turn in range(NUM_STEPS + WARMUP):
        begun = time.perf_counter()
        step = scheduler.plan()
        planned = time.perf_counter()
        assert step is not None, "there is work, but no step to do it"
        result = answer(scheduler, step)
        answered = time.perf_counter()
        scheduler.settle(result)
        if turn >= WARMUP:
            times.append(planned - begun + time.perf_counter() - answered)
        scheduler.output_buffer.pending()
        scheduler.output_buffer.mark_sent()
    gc.unfreeze()
    return 1e6 * median(times)


class _TimedPair(Pair):
    """Notes how long each step takes that computes one token for each row."""

    def turns(self, requests: list[Request]) -> Iterator[float]:
        """Admit the requests, and compute a step at a time. Yields seconds of decode steps."""
        for index, request in enumerate(requests):
            self._admit(index + 1, request)
        while (step := self.scheduler.plan()) is not None:
            assert isinstance(step.counts, bytes)
            counts = np.frombuffer(step.counts, np.int32)
            is_decode = len(counts) == counts.sum() == len(requests)
            begun = time.perf_counter()
            self._compute(step)
            took_s = time.perf_counter() - begun
            self._report()
            if is_decode:
                yield took_s


def _decode_ms(folder: Path, num_rows: int) -> list[float]:
    turns = []
    for divides in (True, False):
        runner = CpuRunner(settings_of(1024, divides=divides, max_num_seqs=16), folder, None)
        requests = [Request(tuple(range(row, row + PROMPT)), DECODE_STEPS + 8) for row in range(num_rows)]
        turns.append(_TimedPair(runner).turns(requests))
    times: list[list[float]] = [[], []]
    for _ in range(DECODE_STEPS):
        for one, taken in zip(turns, times, strict=True):
            taken.append(next(one))
    return [1e3 * median(taken[4:]) for taken in times]


if __name__ == "__main__":
    sys.exit(main())
