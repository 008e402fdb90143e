"""What LoRA adapters cost: the time of steps without adapters, with adapters enabled but unused, and with one adapter
for each row.

    python -m tools.part_bench.lora_costs --model MODEL --rows 8 --rank 16 --rounds 30

Two programs of one model take turns, step by step, so that a busy machine slows both: one without adapters, and one
with as many different adapters as rows. Prints medians of milliseconds, and the ratios of speeds; also of the fastest
steps. With `--threads 1` times are CPU time, and the fastest steps mean something also on a busy machine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from pipeline.config.settings import ExecuteSettings, LoraSettings, ScheduleSettings, Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.lora.adapter_file import AdapterFile, write
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.measuring.plain_adapter import pairs_of
from pipeline.stages.prepare.stage import prepare


def fill(runner: CpuRunner, rows: int, new: int, context: int) -> None:
    """A step in which each of `rows` computes `new` tokens after `context` others."""
    per_row = -(-(context + new) // BLOCK_SIZE)
    tables = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    ids = np.random.default_rng(0).integers(3, 1000, rows * new).astype(np.int32)
    starts, counts = (np.full(rows, number, np.int32) for number in (context, new))
    runner.inputs.fill(ids, starts, counts, tables, np.ones(rows, np.bool_))
    runner.sampling_inputs.greedy[:rows] = 1
    runner.sampling_inputs.unmask(rows)
    runner.sampling_inputs.logprobs.clear(rows)


def run(runner: CpuRunner, clock: Callable[[], float]) -> float:
    begin_s = clock()
    runner.program.run()
    return 1000 * (clock() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=1, help="tokens that each row computes")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    args = parser.parse_args()
    off = Settings(
        model=args.model,
        quantization=args.quantization,
        execute=ExecuteSettings(kv_cache_bytes=256 * 2**20, num_threads=args.threads),
        schedule=ScheduleSettings(max_num_seqs=32, max_num_batched_tokens=max(96, args.rows * args.new)),
    )
    on = msgspec.structs.replace(
        off, lora=LoraSettings(runtime_loading=True, max_loras=args.rows, max_lora_rank=args.rank)
    )
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    folder = prepare(off)
    config = ModelConfig.load(folder)
    runners = [CpuRunner(settings, folder) for settings in (off, on)]
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as made:
        for slot in range(args.rows):
            path = Path(made) / str(slot)
            write(path, "bf16", pairs_of(config, args.rank, lambda shape: random.integers(0, 0x3C00, shape, np.uint16)))
            begin_s = time.perf_counter()
            packed = runners[1].program.pack_adapter(AdapterFile(path))
            packed_s = time.perf_counter()
            runners[1].program.put_adapter(slot, packed)
            pack_ms, put_ms = 1000 * (packed_s - begin_s), 1000 * (time.perf_counter() - packed_s)
    print(
        f"{config.name}: {runners[1].name}, {args.rows} adapters of rank {args.rank}; the last one was packed in "
        f"{pack_ms:.1f} ms and put into its slot in {put_ms:.2f} ms"
    )
    for runner in runners:
        fill(runner, args.rows, args.new, args.context)
    slots = {"unused": np.full(args.rows, -1, np.int32), "one for each row": np.arange(args.rows, dtype=np.int32)}
    slots["one for all rows"] = np.zeros(args.rows, np.int32)
    times: dict[str, list[float]] = {name: [] for name in ("off", *slots)}
    for number in range(args.rounds + 2):
        for name, each in slots.items():
            runners[1].inputs.fill_adapters(each)
            pair = run(runners[0], clock), run(runners[1], clock)
            if number >= 2:
                times["off"].append(pair[0])
                times[name].append(pair[1])
    base, fastest = median(times["off"]), min(times["off"])
    for name, found in times.items():
        print(
            f"{name:>18}: {median(found):8.3f} ms, speed {base / median(found):.3f} of that without adapters; "
            f"fastest {min(found):8.3f} ms, {fastest / min(found):.3f}"
        )
    for runner in runners:
        runner.close()


if __name__ == "__main__":
    main()
