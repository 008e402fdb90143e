"""Three models with room for one take turns under open streams, and stages are killed in the middle of swaps.

    python -m tools.soak.turns                       10 minutes
    python -m tools.soak.turns --minutes 1 --kill 5
    python -m tools.soak.turns --no-kill             prompt tokens computed twice are a fault then, whenever they are
    python -m tools.soak.turns --model a=/models/a --model b=/models/b

24 streams are open all the time, spread over two tiny models and the default one; a model is put to sleep for another
one every few seconds. About every 20 seconds, when no model is awake, a random stage of a random model is killed.

Checked: each text is the one that was served alone. No prompt token is computed twice, unless schedule or execute of
the model was killed. No stream waits longer than its fair share: the quanta of the other models, and what sleeps, wakes
and restarts took meanwhile, and a second more. The memory of all processes stays below `memory_bytes`. Afterwards: the
server's log has no other error, its exit code is 0, and no process is left.

The exit code is 1 if any check fails. The seed determines the requests and the stages, but not the timing.
"""

import argparse
import asyncio
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from pipeline.cli import option_types as types
from pipeline.cli.out_file import PRIVATE, require_writable, write_output, writing
from pipeline.config.values.sizes import size_words
from tools.benchmarks.report import with_seed
from tools.benchmarks.served import Served, exit_code
from tools.soak.__main__ import complaints_of
from tools.soak.turns.kills import Killer
from tools.soak.turns.load import MAX_FAULTS, Load, longest
from tools.soak.turns.pauses import events_of, late_of
from tools.soak.turns.server import STAGES, Asked, memory_bytes, models_of, write_config
from tools.soak.turns.watch import Watch

EXPECTED = re.compile(rf"(?:{'|'.join(STAGES)})\.0(?: died)?: was killed by SIGKILL")
"""What the log says about a kill; without "died", while the model was being loaded."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak.turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the load; by default %(default)g")
    parser.add_argument("--streams", type=types.positive, default=24, metavar="N", help="by default %(default)s")
    parser.add_argument(
        "--quantum", type=float, default=3.0, metavar="S", help="swap_quantum_s; by default %(default)g"
    )
    parser.add_argument("--kill", type=types.positive, default=20, metavar="EVERY_S", help="by default %(default)s")
    parser.add_argument("--no-kill", action="store_true", help="kill nothing")
    parser.add_argument("--slack", type=float, default=1.0, metavar="S", help="of waits; by default %(default)g")
    parser.add_argument(
        "--tokens", type=types.positive, default=1500, metavar="N", help="of each stream of a tiny model"
    )
    parser.add_argument("--threads", type=types.positive, default=1, metavar="N", help="execute.num_threads")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=MODEL", help="instead of the usual models"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--seed", type=types.natural, default=None, help="by default random")
    parser.add_argument("--log", metavar="FILE", help="write the server's log to this file")
    args = with_seed(parser.parse_args(arguments))
    if args.log:
        require_writable(Path(args.log), "--log")
    return exit_code("soak", lambda: 1 if soak(args) else 0)


def soak(args: argparse.Namespace) -> Counter[str]:
    """Run the test and print the findings. Returns the faults."""
    print(f"{args.minutes:g} minutes of load, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = models_of(args.model, Path(folder))
        config = write_config(Path(folder), models, args.quantum, args.threads)
        num_tokens = {
            name: args.tokens if model.startswith(folder) else args.tokens // 10 for name, model in models.items()
        }
        with Served(*args.set, options=("--config", str(config))) as server:
            try:
                faults = _run(args, server, num_tokens)
            finally:
                if args.log:
                    with writing(Path(args.log), "--log"):
                        write_output(Path(args.log), server.log(), PRIVATE)
    for words, count in faults.most_common(MAX_FAULTS):
        print(f"FAULT: {count} × {words}")
    print("no faults" if not faults else f"{faults.total()} faults of {len(faults)} kinds")
    return faults


def _run(args: argparse.Namespace, server: Served, num_tokens: dict[str, int]) -> Counter[str]:
    asked, limit = Asked(server), memory_bytes(len(num_tokens))
    load = Load(server.url, num_tokens, args.streams, args.seed)
    asyncio.run(load.serve_alone())
    print("all models were served alone", flush=True)
    seconds = 60 * args.minutes
    with Watch(asked, limit) as watch:
        killer = Killer(asked, watch, args.kill, args.seed)

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run(seconds))
                if not args.no_kill:
                    group.create_task(killer.run(seconds))

        before = dict(watch.turns)
        asyncio.run(both())
    faults = load.faults + watch.faults + killer.faults
    turns = {name: int(number - before.get(name, 0)) for name, number in watch.turns.items()}
    print(f"streams: {dict(load.outcomes)}; times asleep: {turns}; kills: {dict(killer.kills)}")
    print(f"prompt tokens computed again after kills: {watch.num_recomputed:.0f}")
    if min(turns.values(), default=0) < 1:
        faults[f"not every model was put to sleep: {turns}"] += 1
    kinds = ", ".join(f"{name} {size_words(number)}" for name, number in watch.most_by_kind.items())
    print(f"memory: at most {size_words(watch.most_bytes)} of {size_words(limit)}: {kinds}")
    if watch.most_bytes > limit:
        faults[f"{size_words(watch.most_bytes)} of memory, memory_bytes is {size_words(limit)}"] += 1
    late = late_of(load.waits, events_of(server.log()), len(num_tokens), args.quantum, args.slack)
    print(f"the longest of {len(load.waits)} waits: {longest(load.waits):.1f} s")
    for wait, over_s in sorted(late, key=lambda one: -one[1])[:MAX_FAULTS]:
        faults[f"{wait.model}: a stream waited for {wait.seconds:.1f} s, {over_s:.1f} s more than its fair share"] += 1
    processes = asked.processes()[1:]
    if (code := server.stop()) != 0:
        faults[f"the server ended with exit code {code}"] += 1
    faults.update(f"process {one.pid} is still there" for one in processes if psutil.pid_exists(one.pid))
    faults.update(line for line in complaints_of(server.log()) if not EXPECTED.search(line))
    return faults


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
