"""How long clients wait when a stage dies: 32 streams run, a stage is killed, and the streams go on.

    python -m tools.serving_bench.kill_pauses                        10 servers; on each, every stage is killed once
    python -m tools.serving_bench.kill_pauses --rounds 2 --streams 8
    python -m tools.serving_bench.kill_pauses --restart --repeat 5   each stage restarted five times instead of killed
    python -m tools.serving_bench.kill_pauses --stages schedule      only this stage

Every server gets each kill once, because the second restart of a stage within a minute is delayed; restarts on purpose
are not. The stages end one after the other under the same streams, so that --repeat needs KV memory for one turn only.
Streams have prompts of different texts, and about --tokens tokens behind them when the first stage ends. For each end:

- "pause": the median over the streams of the longest time that each of them waited for its next event
- "first": the shortest of these times
- "quiet": the median of the longest gaps in the seconds before the kill
- of the first stage "prefill": what new prompts take that are as long as all of these streams were when it ended, from
  the first to the last one's first token. After execute, without swap space, the streams' tokens are computed again, so
  the pause can't be shorter than that; with --set execute.swap_bytes=1GiB their KV blocks are copied back. After
  schedule, their KV blocks are still in the executor
- for ingest "TTFT": the time to the first token of requests sent right after the kill, and "TTFT quiet" of requests
  sent before it

The printed values are medians over the rounds, with the largest in parentheses. Run it on a quiet machine.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp
import msgspec

from pipeline.cli import option_types as types
from pipeline.cli.bench import words
from pipeline.cli.out_file import write_output
from pipeline.errors import UserError
from tools.benchmarks.served import Served, exit_code
from tools.benchmarks.streams import Stream, cancel, have_events, session_of, until

STAGES = ("execute", "detokenize", "ingest", "schedule")
PROMPT_WORDS = 60
MAX_TOKENS = 4000
"""More than a stream gets before it is cut off."""
QUIET_S = 2.0
IN_FLIGHT_S = 0.3
"""Events that come sooner after a kill were on their way."""
AFTER_S = 1.0
"""Streams are watched for so long after all of them have gone on."""
BACK_S = 60.0
NUM_NEW = 4
"""Requests sent right after a kill, and before it."""


async def _round(server: Served, args: argparse.Namespace, number: int) -> list[tuple[str, dict[str, float]]]:
    """End each stage. Returns stages, and seconds by name."""
    found: list[tuple[str, dict[str, float]]] = []
    nums: list[int] = []
    async with session_of(server.url, BACK_S) as session:
        for turn in range(args.repeat):
            seed = f"{number}/{turn}"
            streams = [Stream() for _ in range(args.streams)]
            running = [
                asyncio.create_task(one.run(session, words.text(f"{seed}/{index}", PROMPT_WORDS), MAX_TOKENS))
                for index, one in enumerate(streams)
            ]
            try:
                await until(partial(have_events, streams, args.tokens), running, BACK_S)
                for stage in args.stages:
                    nums = nums or [len(one.at_s) for one in streams]
                    end = _restart if args.restart else _kill
                    measured = await _measure(server, session, stage, streams, running, f"{seed}/{stage}", end)
                    found.append((stage, measured))
            finally:
                await cancel(running)
            await asyncio.sleep(1.0)
        if not args.no_prefill:
            found[0][1]["prefill"] = await _prefill(session, nums, f"{number}")
    return found


async def _kill(server: Served, stage: str) -> None:
    os.kill(server.pids[f"{stage}.0"], signal.SIGKILL)


async def _restart(server: Served, stage: str) -> None:
    command = (sys.executable, "-m", "pipeline", "restart", stage, "--url", server.url)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise UserError(f"'pipeline restart {stage}' has failed")


async def _measure(
    server: Served,
    session: aiohttp.ClientSession,
    stage: str,
    streams: list[Stream],
    running: list["asyncio.Task[None]"],
    seed: str,
    end: Callable[[Served, str], Awaitable[None]],
) -> dict[str, float]:
    """End a stage, and see how long the streams wait."""
    found: dict[str, float] = {}
    if stage == "ingest":
        found["TTFT quiet"] = await _first_tokens(session, f"{seed}/before")
    else:
        await asyncio.sleep(QUIET_S)
    killed_s = time.perf_counter()
    await end(server, stage)
    ended_s = time.perf_counter()  # a restart takes a while
    if stage == "ingest":
        found["TTFT"] = await _first_tokens(session, f"{seed}/after")
    await until(lambda: all(one.at_s[-1] > ended_s + IN_FLIGHT_S for one in streams), running, BACK_S)
    await asyncio.sleep(AFTER_S)
    pauses_s = [one.longest_gap_s(killed_s, time.perf_counter()) for one in streams]
    found["pause"], found["first"] = median(pauses_s), min(pauses_s)
    found["quiet"] = median(one.longest_gap_s(killed_s - QUIET_S, killed_s) for one in streams)
    return found


async def _prefill(session: aiohttp.ClientSession, nums: list[int], seed: str) -> float:
    """How long prompts take that are about as long as these numbers of tokens and a prompt, in seconds."""
    new = [Stream() for _ in nums]
    begun_s = time.perf_counter()
    await asyncio.gather(
        *(
            one.run(session, words.text(f"{seed}/prefill/{index}", PROMPT_WORDS + nums[index]), 1)
            for index, one in enumerate(new)
        )
    )
    return max(one.at_s[-1] for one in new) - begun_s


async def _first_tokens(session: aiohttp.ClientSession, seed: str) -> float:
    """The median time to the first token of some new requests, in seconds."""
    new = [Stream() for _ in range(NUM_NEW)]
    begun_s = time.perf_counter()
    await asyncio.gather(
        *(one.run(session, words.text(f"{seed}/{index}", PROMPT_WORDS), 2) for index, one in enumerate(new))
    )
    return median(one.at_s[0] - begun_s for one in new)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.serving_bench.kill_pauses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=types.positive, default=10, metavar="N", help="by default %(default)s")
    parser.add_argument("--streams", type=types.positive, default=32, metavar="N", help="by default %(default)s")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="by default all of these")
    parser.add_argument("--tokens", type=types.positive, default=128, metavar="N", help="by default %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--restart", action="store_true", help="restart the stages on purpose")
    parser.add_argument("--repeat", type=types.positive, default=1, metavar="N", help="with --restart: so often each")
    parser.add_argument("--no-prefill", action="store_true", help="don't measure what prefill takes")
    parser.add_argument("--json", metavar="FILE", help="write all values to this file")
    args = parser.parse_args(arguments)
    if args.repeat > 1 and not args.restart:
        parser.error("--repeat needs --restart: the second restart of a stage that has died is delayed")
    return exit_code("kill_pauses", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    values: dict[str, dict[str, list[float]]] = {stage: defaultdict(list) for stage in args.stages}
    for number in range(args.rounds):
        with Served("supervisor.crash_reports=false", *args.set) as server:
            for stage, found in asyncio.run(_round(server, args, number)):
                for name, value in found.items():
                    values[stage][name].append(value)
                shown = ", ".join(f"{name} {value:.2f} s" for name, value in found.items())
                print(f"round {number + 1} of {args.rounds}, {stage}: {shown}", flush=True)
    for stage in args.stages:
        shown = ", ".join(f"{name} {median(all_s):.2f} s ({max(all_s):.2f})" for name, all_s in values[stage].items())
        print(f"{stage:10} {shown}")
    if args.json:
        write_output(Path(args.json), msgspec.json.encode(values))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
