"""`long-prompt`: the cost of a prompt of 4,000 tokens for 16 running streams, with and without the long-prompt
threshold.

16 streams decode 1,400 tokens each, of one request. When all have started, an uncached long prompt is sent, with one
token out. After its reply and a pause the next one follows, three in all. Then the streams run to their ends.

- "ITL p99 quiet": gaps between two chunks of a stream while no long prompt was there and all streams ran. "ITL p99
  prefill": gaps whose second chunk came between the sending of a long prompt and its first token.
- "tok/s": all tokens of prompts and outputs, over the time from the first request sent to the last token. Both arms do
  the same work: 16 prompts with their outputs, and 3 long prompts. Counting only while a long prompt is there would be
  unfair: prompt tokens are cheaper than decoded ones, so delaying the streams would look better. The streams end last
  in both arms, or the run fails, so there is no time with only a prompt to compute.
- "long TTFT": median of the long prompts' times to their token.

Bounds, for the arm with the threshold: p99 ITL prefill / quiet is at most 2.5 (median of the rounds), and tok/s are at
least 0.95 of the other arm's.
"""

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

import msgspec

from pipeline.cli import option_types as types
from pipeline.cli.bench import words
from pipeline.cli.bench.client import BenchClient, RequestResult, open_session
from pipeline.cli.bench.tally import Tally
from pipeline.errors import UserError
from tools.benchmarks import loads, report
from tools.benchmarks.pairs import Reading, compare, spread
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.served import Served

ARMS = ("no threshold", "threshold")
SHORT_TOKENS = 40
KV_BYTES = 1024**3
START_S = 120.0
"""Deadline for all streams to start."""
POLL_S = 0.01

MAX_RATIO = 2.5
LEAST_RATE = 0.95

Window = tuple[float, float]


class Run(msgspec.Struct, frozen=True):
    """The measurements of one server."""

    streams: list[RequestResult]
    longs: list[RequestResult]
    begun_s: float
    """When every stream had its first text."""


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=3, seconds=2.0)
    parser.add_argument("--streams", type=types.positive, default=16, metavar="N", help="by default %(default)s")
    parser.add_argument(
        "--output-tokens", type=types.positive, default=1400, metavar="N", help="of each stream; by default %(default)s"
    )
    parser.add_argument(
        "--long-tokens", type=types.positive, default=4000, metavar="N", help="of a long prompt; by default %(default)s"
    )
    parser.add_argument("--longs", type=types.positive, default=3, metavar="N", help="in all; by default %(default)s")


def run(args: argparse.Namespace) -> int:
    """--seconds is the pause before each long prompt."""
    found = BenchmarkReport("long-prompt", args)

    def measure(arm: int, number: int) -> Reading:
        sets = [*args.set, f"execute.kv_cache_bytes={KV_BYTES}"]
        if arm == 0:
            sets.append("schedule.long_prompt_tokens=0")
        with Served(*sets) as server:
            seen = asyncio.run(_drive(server.url, args, f"{args.seed}/{number}"))
        for record in (*seen.streams, *seen.longs):
            if record.error is not None:
                found.errors[record.error] += 1
        if any(record.error is not None or not record.arrivals for record in (*seen.streams, *seen.longs)):
            raise UserError(f"a request failed: {dict(found.errors)}")
        return reading_of(seen)

    comparison = compare(ARMS, args.rounds, measure, found.tell)
    found.comparison("a long prompt beside running streams", comparison)
    rate = comparison.ratio("tok/s")
    found.verdicts += [
        Verdict("p99 ITL while a long prompt is there / without it", comparison.median(1, "ratio"), "<=", MAX_RATIO),
        Verdict("tokens/s with the threshold / without", rate.median if rate else 0.0, ">=", LEAST_RATE),
    ]
    return found.finish()


async def _drive(url: str, args: argparse.Namespace, seed: str) -> Run:
    async with open_session(None, loads.TIMEOUT_S) as session:
        client = BenchClient(session, url, "auto", loads.ENDPOINT)
        await client.find_model()
        calibration = await loads.calibrate(client, seed)
        tallies = [Tally(loads.ENDPOINT) for _ in range(args.streams)]
        num_short, num_long = map(calibration.words_for, (SHORT_TOKENS, args.long_tokens))
        greedy = {"temperature": 0, "ignore_eos": True}
        tasks = [
            asyncio.create_task(
                client.generate(
                    words.text(f"{seed}/{index}", num_short), greedy | {"max_tokens": args.output_tokens}, tally
                )
            )
            for index, tally in enumerate(tallies)
        ]
        try:
            await _until_begun(tasks, tallies)
            begun_s = perf_counter()
            longs = []
            for number in range(args.longs):
                await asyncio.sleep(args.seconds)
                prompt = words.text(f"{seed}/long/{number}", num_long)
                longs.append(await client.generate(prompt, greedy | {"max_tokens": 1}))
                if any(task.done() for task in tasks):
                    raise UserError(
                        "a stream ended before the long prompts did: raise --output-tokens, or lower --longs"
                    )
            return Run(await asyncio.gather(*tasks), longs, begun_s)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)


async def _until_begun(tasks: Sequence["asyncio.Task[RequestResult]"], tallies: Sequence[Tally]) -> None:
    end = perf_counter() + START_S
    while not all(tally.arrivals for tally in tallies):
        if perf_counter() > end or any(task.done() for task in tasks):
            raise UserError(f"the streams did not all begin within {START_S:g} s, or one ended before the others began")
        await asyncio.sleep(POLL_S)


def reading_of(seen: Run) -> Reading:
    prefills = [(record.sent_s, record.arrivals[0]) for record in seen.longs]
    quiet = quiet_windows(seen.begun_s, prefills, min(record.arrivals[-1] for record in seen.streams))
    arrivals = [record.arrivals for record in seen.streams]
    (quiet_p50, quiet_p99), (prefill_p50, prefill_p99) = (
        spread(gaps_within(arrivals, quiet)),
        spread(gaps_ending_in(arrivals, prefills)),
    )
    everything = [*seen.streams, *seen.longs]
    begun_s, ended_s = min(record.sent_s for record in everything), max(record.ended_s for record in everything)
    num_tokens = sum(record.prompt_tokens + record.completion_tokens for record in everything)
    return {
        "ITL p50 quiet ms": 1000 * quiet_p50,
        "ITL p99 quiet ms": 1000 * quiet_p99,
        "ITL p50 prefill ms": 1000 * prefill_p50,
        "ITL p99 prefill ms": 1000 * prefill_p99,
        "ratio": prefill_p99 / quiet_p99 if quiet_p99 else float("inf"),
        "tok/s": num_tokens / (ended_s - begun_s),
        "tokens": float(num_tokens),
        "long TTFT ms": 1000 * median(record.arrivals[0] - record.sent_s for record in seen.longs),
    }


def quiet_windows(begun_s: float, prefills: Sequence[Window], ended_s: float) -> list[Window]:
    """The parts of [begun, ended] outside of these windows, which are sorted and disjoint."""
    edges = [begun_s, *(edge for window in prefills for edge in window), ended_s]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]


def gaps_within(streams: Sequence[Sequence[float]], windows: Sequence[Window]) -> list[float]:
    """Gaps between neighbouring chunks of a stream that are in the same window."""
    return [
        later - earlier
        for arrivals in streams
        for earlier, later in pairwise(arrivals)
        if any(low <= earlier and later <= high for low, high in windows)
    ]


def gaps_ending_in(streams: Sequence[Sequence[float]], windows: Sequence[Window]) -> list[float]:
    """Gaps whose second chunk is in a window."""
    return [
        later - earlier
        for arrivals in streams
        for earlier, later in pairwise(arrivals)
        if any(low <= later <= high for low, high in windows)
    ]
