"""`no-hits`: the cost of prefix caching if no prompts share a prefix: on against off.

There are two measures, because rates over HTTP vary by more than the bound of 1 %:

- The scheduler alone, in this process: 32 concurrent sequences with prompts of 128 tokens, 128 out. CPU time of admit +
  plan + settle + close for each request, with alternating arms. The pool has 1,456 blocks, as 512 MiB hold of the
  default model, so blocks are evicted all the time. The loss is the time that caching adds to a request, times the
  requests/s of the server: at depth 1 nothing else is computed meanwhile.
- A server over HTTP with the same load, a new one for each arm and round: output tokens/s. --instant uses an executor
  that computes nothing. Then the loss is larger than with any model, and no bound is checked.

Bounds: the loss is below 1 % by the first measure. By the second, the high end of the ratio's interval is at least
0.99. With up to 8 rounds the interval is the whole range.
"""

import argparse
import asyncio
from collections import Counter
from statistics import median

from pipeline.cli import option_types as types
from tools.benchmarks import report
from tools.benchmarks.loads import BenchmarkLoad, Span, closed_loop
from tools.benchmarks.pairs import Reading, compare
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.scheduler_alone import request_cost
from tools.benchmarks.served import Served

ARMS = ("caching off", "caching on")
TOKENS = Span(128, 128)
NUM_STREAMS = 32
NUM_BLOCKS = 1456
LEAST_RATIO = 0.99
MAX_LOSS_PERCENT = 1.0
HAS_NO_HITS = "tokens found in the cache"


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=6, seconds=20.0)
    parser.add_argument("--instant", action="store_true", help="servers with an executor that computes nothing")
    parser.add_argument(
        "--requests",
        type=types.positive,
        default=640,
        metavar="N",
        help="of the scheduler alone, each round; by default %(default)s",
    )
    parser.add_argument(
        "--scheduler-only",
        type=float,
        default=None,
        metavar="REQUESTS_PER_S",
        help="start no server; the rate of requests to judge the scheduler's loss by",
    )


def run(args: argparse.Namespace) -> int:
    found = BenchmarkReport("no-hits", args)

    def alone(arm: int, number: int) -> Reading:
        cost_s = request_cost(arm == 1, args.requests, NUM_STREAMS, TOKENS.most, TOKENS.most, NUM_BLOCKS, args.seed)
        return {"µs a request": 1e6 * cost_s}

    scheduler = compare(ARMS, max(args.rounds, 6), alone, lambda words: None)
    found.comparison("the scheduler alone, processor time", scheduler)

    def measure(arm: int, number: int) -> Reading:
        options = ("--instant",) if args.instant else ()
        with Served(*args.set, f"schedule.prefix_caching={str(arm == 1).lower()}", options=options) as server:
            load = BenchmarkLoad(NUM_STREAMS, TOKENS, TOKENS, args.seconds, f"{args.seed}/{number}")
            summary = asyncio.run(closed_loop(server.url, load))
            schedule = server.schedule()
        found.errors += Counter(summary.errors)
        return {
            "output tok/s": summary.output_tokens_per_s,
            "requests/s": summary.requests_per_s,
            "TTFT p50 ms": summary.ttft_ms.p50,
            "ITL p50 ms": summary.itl_ms.p50,
            "cached tokens": float(schedule.num_cached_tokens),
            "schedule µs a step": 1e6 * (schedule.plan_s + schedule.settle_s) / max(1, schedule.num_steps),
        }

    requests_per_s = args.scheduler_only
    if requests_per_s is None:
        over_http = compare(ARMS, args.rounds, measure, found.tell)
        found.comparison("a server over HTTP" + (", instant executor" if args.instant else ""), over_http)
        requests_per_s = over_http.median(0, "requests/s")
        tokens = over_http.ratio("output tok/s")
        if tokens is not None and tokens.high - tokens.low > 2 * (1 - LEAST_RATIO):
            words = "the rounds over HTTP differ by too much to tell 1 %: more --rounds or --seconds say more"
            found.note("is_noisy", True, words)
        found.verdicts.append(
            Verdict("output tokens/s on / off, high end", tokens.high if tokens else 0.0, ">=", LEAST_RATIO)
        )
        found.verdicts.append(Verdict(HAS_NO_HITS, over_http.median(1, "cached tokens"), "<=", 0))
    off, on = ([reading["µs a request"] for reading in arm] for arm in scheduler.readings)
    added_us = median(b - a for a, b in zip(off, on, strict=True))
    loss_percent = 1e-6 * added_us * requests_per_s * 100
    found.note(
        "loss",
        {"added_us": added_us, "requests_per_s": requests_per_s, "percent": loss_percent},
        f"caching adds {added_us:.0f} µs to a request; at {requests_per_s:.1f} requests/s that is {loss_percent:.3f} % "
        "of the time",
    )
    found.verdicts.append(Verdict("loss in the scheduler, percent", loss_percent, "<", MAX_LOSS_PERCENT))
    if args.instant:
        found.verdicts = [verdict for verdict in found.verdicts if verdict.words == HAS_NO_HITS]
    return found.finish()
