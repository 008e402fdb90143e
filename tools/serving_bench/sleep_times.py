"""How long a server takes to fall asleep and to wake under open streams, and what of it each phase takes.

    python -m tools.serving_bench.sleep_times                              the default model, 4 streams, 5 rounds
    python -m tools.serving_bench.sleep_times --model FILE.gguf --rounds 10
    python -m tools.serving_bench.sleep_times --streams 0                  with nothing open

In each round, every stream gets --tokens more tokens, then the server sleeps for --asleep seconds and wakes.

- "asleep": from POST /sleep to its answer. "step": of it, until the steps in flight have ended. "save": to save the KV
  blocks. "end": until the executor is gone
- "awake": from POST /wake_up to its answer. "load": of it, until the new executor has loaded the model
- "first": from the answer to the first event of the last stream
- "wake CPU": the CPU time of the new executor until the answer; "first CPU": until the last stream has its first event

The printed values are medians over the rounds, with the largest in parentheses. On a busy machine, the seconds are
upper bounds, and the CPU times still count. The texts are compared with those of streams that no sleep interrupts.
"""

import argparse
import asyncio
import re
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import psutil

from pipeline.cli import option_types as types
from pipeline.cli.bench import words
from pipeline.cli.out_file import write_output
from pipeline.errors import UserError
from tools.benchmarks.served import Served, exit_code
from tools.benchmarks.streams import Stream, cancel, have_events, session_of, until

BACK_S = 120.0
ASLEEP = re.compile(r" asleep saved=(\S+) step_s=(\S+) save_s=(\S+) end_s=(\S+) took_s=(\S+)")
AWAKE = re.compile(r" awake took_s=(\S+)")
EXECUTOR = "pipeline: execute.0"


def executor_of(server: Served) -> psutil.Process:
    """The newest process of the executor. Raises UserError if there is none."""
    found = [one for one in psutil.Process(server.pid).children() if one.cmdline()[:1] == [EXECUTOR]]
    if not found:
        raise UserError("the executor has no process")
    return max(found, key=lambda one: one.create_time())


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(server: Served, args: argparse.Namespace) -> list[dict[str, float]]:
    """The seconds of each round, by phase. Raises UserError if a text differs from that of a stream alone."""
    rounds: list[dict[str, float]] = []
    async with session_of(server.url, args.asleep + BACK_S) as session:
        max_tokens = args.tokens * (args.rounds + 2)
        prompts = [words.text(f"sleep/{index}", args.prompt_words) for index in range(args.streams)]
        streams = [Stream() for _ in prompts]
        running = [
            asyncio.create_task(one.run(session, prompt, max_tokens))
            for one, prompt in zip(streams, prompts, strict=True)
        ]
        try:
            for number in range(args.rounds):
                await until(partial(have_events, streams, (number + 1) * args.tokens), running, BACK_S)
                rounds.append(await one_round(server, session, streams, running, args))
                shown = ", ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items())
                print(f"round {number + 1} of {args.rounds}: {shown}", flush=True)
            await asyncio.gather(*running)
        finally:
            await cancel(running)
        for one, prompt in zip(streams, prompts, strict=True) if args.check else ():
            alone = Stream()
            await alone.run(session, prompt, max_tokens)
            if alone.text != one.text:
                raise UserError(f"a stream has another text than without a sleep: {one.text!r}, {alone.text!r}")
    return rounds


async def one_round(
    server: Served,
    session: aiohttp.ClientSession,
    streams: list[Stream],
    running: "list[asyncio.Task[None]]",
    args: argparse.Namespace,
) -> dict[str, float]:
    """Sleep and wake. Returns seconds by phase."""
    begun_s = time.perf_counter()
    await post(session, "/sleep?level=1")
    found = {"asleep": time.perf_counter() - begun_s}
    (*_, slept) = ASLEEP.finditer(server.log())
    found |= {name: float(slept[index]) for index, name in ((2, "step"), (3, "save"), (4, "end"))}
    await asyncio.sleep(args.asleep)
    begun_s = time.perf_counter()
    await post(session, "/wake_up")
    awake_s = time.perf_counter()
    executor = executor_of(server)
    found |= {"awake": awake_s - begun_s, "wake CPU": cpu_s(executor)}
    (*_, woken) = AWAKE.finditer(server.log())
    found["load"] = float(woken[1])
    if streams:
        await until(lambda: all(one.at_s[-1] > begun_s for one in streams), running, BACK_S)
        found |= {"first": time.perf_counter() - awake_s, "first CPU": cpu_s(executor)}
    return found


async def post(session: aiohttp.ClientSession, path: str) -> None:
    async with session.post(path, skip_auto_headers=("Content-Type",)) as response:
        if response.status != 200:
            raise UserError(f"POST {path}: {response.status}: {(await response.text())[:200]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.serving_bench.sleep_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="by default the server's default model")
    parser.add_argument("--rounds", type=types.positive, default=5, metavar="N", help="by default %(default)s")
    parser.add_argument("--streams", type=types.natural, default=4, metavar="N", help="by default %(default)s")
    parser.add_argument("--tokens", type=types.positive, default=16, metavar="N", help="by default %(default)s")
    parser.add_argument("--prompt-words", type=types.positive, default=60, metavar="N", help="by default %(default)s")
    parser.add_argument("--asleep", type=float, default=1.0, metavar="S", help="seconds, by default %(default)g")
    parser.add_argument("--no-check", dest="check", action="store_false", help="don't compare the texts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--json", metavar="FILE", help="write all values to this file")
    args = parser.parse_args(arguments)
    return exit_code("sleep_times", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    options = ("--model", args.model) if args.model else ()
    with Served("gateway.enable_sleep_mode=true", *args.set, options=options) as server:
        rounds = asyncio.run(measure(server, args))
    values: dict[str, list[float]] = defaultdict(list)
    for one in rounds:
        for name, value in one.items():
            values[name].append(value)
    for name, all_s in values.items():
        print(f"{name:10} {median(all_s):.2f} s ({max(all_s):.2f})")
    if args.json:
        write_output(Path(args.json), msgspec.json.encode(values))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
