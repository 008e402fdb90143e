"""Compares the executor's steps of several ranks with those of one process that has as many threads.

    python -m tools.part_bench.ranks --quantization none --rounds 5
    python -m tools.part_bench.ranks --tp 1 --pp 2

Each side computes the same steps in turn, in processes of its own, while the other sleeps: decoding 1, 8 and 32
sequences behind 256 tokens, and a prompt in chunks of 96 tokens. The stages of a pipeline (`--pp`) compute steps at
once, as schedule plans them: each has a part of the sequences, or another chunk. Times are those of an id for each
sequence, and of a chunk. The result is the median of the rounds' ratios, the time of one process divided by that of the
ranks: above 1, the ranks are faster.
"""

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings

CONTEXT = 256
CHUNK = 96
CASES = {"decode c=1": 1, "decode c=8": 8, "decode c=32": 32, "prefill": 0}
"""Sequences that decode; 0: a chunk of a prompt."""
VISIT_S = 0.4
MOST_TOKENS = 1024
BLOCK_SIZE = 16


def serve(pipe: Connection, settings: Settings, folder: str, number: int, fds: tuple[int, int]) -> None:
    """A process that computes: answers each case with the seconds of a step. `fds` are the memory of the ranks of its
    stage, and that of all stages."""
    from pipeline.stages.execute.cores import use_cores
    from pipeline.stages.execute.cpu.runner import CpuRunner
    from pipeline.stages.execute.measuring.planned import row_add, step, take
    from pipeline.stages.execute.ranks.context import RankContext

    use_cores(settings, number)
    execute = settings.execute
    stage, rank = divmod(number, execute.tensor_parallel)
    context = RankContext(rank, execute.tensor_parallel, fds[0], 30.0, stage, execute.pipeline_parallel, fds[1])
    runner = CpuRunner(settings, Path(folder), None, context)
    runner.masks.start()
    blocks_each = MOST_TOKENS // BLOCK_SIZE
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        num_seqs, num_steps = order
        rows = range(max(1, num_seqs))
        ids = [[(7 * row + i) % 1000 + 10 for i in range(CONTEXT)] for row in rows]
        adds = [row_add(row, ids[row], range(row * blocks_each, (row + 1) * blocks_each)) for row in rows]
        runner.step(step(adds=adds), take)
        seconds = []
        num_parts = min(len(rows), execute.pipeline_parallel)
        for i in range(num_steps):
            if num_seqs:
                parts = [rows[part::num_parts] for part in range(num_parts)]
                messages = [step([(row, CONTEXT - 1 + i, 1, True) for row in part]) for part in parts]
            else:
                messages = [step([(0, 0, CHUNK, False)], adds, drops=[0])]
            began = time.perf_counter()
            for message in messages:
                runner.step(message, take)
            seconds.append(time.perf_counter() - began)
        waited = runner.barrier_wait_s() + runner.pipeline_wait_s()
        runner.step(step(drops=rows), take)
        pipe.send((seconds, waited))
    runner.close()


class RankProcesses:
    """The processes of one side."""

    def __init__(self, settings: Settings, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        execute = settings.execute
        files = [f"/proc/{os.getpid()}/fd/{os.memfd_create('ranks', 0)}" for _ in range(execute.pipeline_parallel + 1)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(execute.num_ranks):
            ours, theirs = spawn.Pipe()
            own = files[number // execute.tensor_parallel]
            process = spawn.Process(
                target=_opened, args=(theirs, settings, folder, number, (own, files[-1])), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def run(self, num_seqs: int, num_steps: int) -> list[float]:
        """Seconds of each step, by the clock of the last rank, which is in the last stage."""
        for pipe in self._pipes:
            pipe.send((num_seqs, num_steps))
        found: list[list[float]] = [pipe.recv()[0] for pipe in self._pipes]
        return found[-1]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)


def _opened(pipe: Connection, settings: Settings, folder: str, number: int, files: tuple[str, str]) -> None:
    serve(pipe, settings, folder, number, (os.open(files[0], os.O_RDWR), os.open(files[1], os.O_RDWR)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--quantization", default=Settings().quantization)
    parser.add_argument("--tp", type=int, default=2, help="ranks of each stage")
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="of each stage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pin", action="store_true", help="give each rank the core of its number")
    args = parser.parse_args()
    from pipeline.stages.prepare.stage import prepare

    folder = str(prepare(Settings(model=args.model, quantization=args.quantization)))

    def settings(tensor_parallel: int, pipeline_parallel: int) -> Settings:
        num_ranks = tensor_parallel * pipeline_parallel
        is_pinned = args.pin and num_ranks > 1
        execute = ExecuteSettings(
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            pipeline_layers=tuple(args.layers) if pipeline_parallel > 1 else (),
            num_threads=1 if is_pinned else args.tp * args.pp // tensor_parallel,
            kv_cache_bytes=1024**3 // tensor_parallel,  # a stage may have most of the layers
            cores=tuple(map(str, range(num_ranks))) if is_pinned else (),
        )
        return Settings(execute=execute, schedule=ScheduleSettings(max_num_seqs=32, max_num_batched_tokens=CHUNK))

    sides = [RankProcesses(settings(*nums), folder) for nums in ((1, 1), (args.tp, args.pp))]
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    times: dict[str, list[list[float]]] = {name: [[], []] for name in CASES}
    for number in range(args.rounds + 1):
        for name, num_seqs in CASES.items():
            found = []
            for side, measured in zip(sides, times[name], strict=True):
                num_steps = 3 if not number else max(5, min(400, round(VISIT_S / measured[-1])))
                found.append(median(side.run(num_seqs, num_steps)))
                measured.append(found[-1])
            if number:
                ratios[name].append(found[0] / found[1])
    for side in sides:
        side.close()
    print(f"{args.model}, {args.quantization}, --tp {args.tp} --pp {args.pp}, {args.rounds} rounds")
    print("case          one process    ranks    ratio   (least to most)")
    for name in CASES:
        one, several = (median(measured[1:]) * 1e3 for measured in times[name])
        found = sorted(ratios[name])
        print(
            f"{name:12}  {one:8.2f} ms  {several:6.2f} ms   {median(found):.2f}    ({found[0]:.2f} to {found[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
