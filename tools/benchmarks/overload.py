"""`overload`: ten times as many requests as can be served, from clients that ignore Retry-After.

The server has gateway.max_open_sequences = Q (64) and schedule.max_num_seqs = S (16). Prompts have 128 tokens and share
nothing, outputs 64. First a closed loop of S streams runs without any queue. Its requests/s are the sustainable rate
mu, and its p99 TTFT is that of a request which gets a row immediately. Then requests arrive for --seconds at a rate of
10 mu, as a Poisson process that does not wait for replies (an open loop).

The bound of TTFT follows from the limits. A request is admitted only if fewer than Q are open, and S of these have
rows. So at most Q - S wait for a row, including the request itself. Requests end at a rate of mu, and each end frees a
row. So the longest wait is (Q - S) / mu, followed by the TTFT of a request that gets a row immediately:

    bound = (Q - S) / mu + p99 TTFT of the closed loop

- "503 p99": from sending to the whole answer, for requests answered with 503.
- The load runs in this process. "generator cores" is its CPU time over wall time, which it takes from the server on a
  machine with few cores. "late p99" is how late it sent requests, which is part of the 503's time.
- Memory is sampled four times per second during the arrivals. It is bounded if the median of the last quarter is at
  most 3 % + 8 MB above that of the second.

Bounds: p99 of 503 answers below 50 ms; p99 TTFT of admitted requests at most 1.5 times the bound; memory as above; no
other outcomes.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from time import perf_counter

from pipeline.cli import option_types as types
from pipeline.cli.bench.client import BenchClient, RequestResult, open_session
from tools.benchmarks import loads, report
from tools.benchmarks.loads import BenchmarkLoad, Span, ask_of, closed_loop
from tools.benchmarks.pairs import Reading, spread
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.served import Served
from tools.benchmarks.watch import Watch, memory_of

PROMPT, OUTPUT = Span(128, 128), Span(64, 64)
WATCH_EVERY_S = 0.25
MAX_REFUSAL_MS = 50.0
MAX_TTFT_RATIO = 1.5


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=None, seconds=30.0)
    parser.add_argument(
        "--times", type=float, default=10.0, metavar="X", help="the sustainable rate; by default %(default)g"
    )
    parser.add_argument("--open", type=types.positive, default=64, metavar="Q", help="gateway.max_open_sequences")
    parser.add_argument("--rows", type=types.positive, default=16, metavar="S", help="schedule.max_num_seqs")
    parser.add_argument(
        "--open-tokens",
        type=types.positive,
        default=16384,
        metavar="N",
        help="gateway.max_open_tokens; by default %(default)s, which is room for the prompts of Q requests",
    )


def run(args: argparse.Namespace) -> int:
    found = BenchmarkReport("overload", args)
    sets = [
        *args.set,
        f"gateway.max_open_sequences={args.open}",
        f"gateway.max_open_tokens={args.open_tokens}",
        f"schedule.max_num_seqs={args.rows}",
    ]
    with Served(*sets) as server:
        found.tell(f"the sustainable rate: {args.rows} streams")
        calm = asyncio.run(
            closed_loop(server.url, BenchmarkLoad(args.rows, PROMPT, OUTPUT, args.seconds / 2, f"{args.seed}/calm"))
        )
        found.errors.update(calm.errors)
        rate = args.times * calm.requests_per_s
        found.tell(f"{rate:.1f} requests a second for {args.seconds:g} s")
        load = BenchmarkLoad(1, PROMPT, OUTPUT, args.seconds, f"{args.seed}/flood")
        begun_s, own_s = perf_counter(), time.process_time()
        with Watch(server.pids, WATCH_EVERY_S) as watch:
            records, lates = asyncio.run(_flood(server.url, load, rate))
        cores = (time.process_time() - own_s) / (perf_counter() - begun_s)
    refused, admitted, failed = divide(records)
    for record in failed:
        found.errors[record.error or ""] += 1
    bound_ms = ttft_bound_ms(args.open, args.rows, calm.requests_per_s, calm.ttft_ms.p99)
    refusal_p50, refusal_p99 = spread([1000 * (record.ended_s - record.sent_s) for record in refused])
    ttft_p50, ttft_p99 = spread([1000 * (record.arrivals[0] - record.sent_s) for record in admitted])
    reading: Reading = {
        "sent/s": len(records) / args.seconds,
        "refused": float(len(refused)),
        "admitted": float(len(admitted)),
        "failed": float(len(failed)),
        "503 p50 ms": refusal_p50,
        "503 p99 ms": refusal_p99,
        "TTFT p50 ms": ttft_p50,
        "TTFT p99 ms": ttft_p99,
        "generator cores": cores,
        "late p99 ms": 1000 * spread(lates)[1],
    }
    found.note(
        "calm",
        {"requests_per_s": calm.requests_per_s, "ttft_p99_ms": calm.ttft_ms.p99, "bound_ms": bound_ms},
        f"sustainable: {calm.requests_per_s:.2f} requests/s, p99 TTFT {calm.ttft_ms.p99:.0f} ms; bound of TTFT: "
        f"({args.open} - {args.rows}) / {calm.requests_per_s:.2f} s + that = {bound_ms:.0f} ms",
    )
    found.readings(f"{args.times:g} times the sustainable rate", [reading])
    found.verdicts += [
        Verdict("requests answered with 503", float(len(refused)), ">", 0),
        Verdict("p99 of 503 answers, ms", refusal_p99, "<", MAX_REFUSAL_MS),
        Verdict("p99 TTFT of admitted requests / the bound", ttft_p99 / bound_ms, "<=", MAX_TTFT_RATIO),
    ]
    while_flooded = [sample for sample in watch.samples if sample.at_s <= watch.samples[0].at_s + args.seconds]
    for memory in memory_of(while_flooded):
        found.verdicts.append(Verdict(f"memory of {memory.name}, MB", memory.last / 1e6, "<=", memory.bound / 1e6))
    return found.finish()


async def _flood(url: str, load: BenchmarkLoad, rate: float) -> tuple[list[RequestResult], list[float]]:
    """Send requests at this rate, without waiting for replies. Returns the results, and how late each request was
    sent."""
    async with open_session(None, loads.TIMEOUT_S) as session:
        client = BenchClient(session, url, "auto", loads.ENDPOINT)
        await client.find_model()
        calibration = await loads.calibrate(client, load.seed)
        plan = [
            (at_s, ask_of(load, str(number), calibration))
            for number, at_s in enumerate(arrivals_of(load.seed, rate, load.seconds))
        ]
        tasks: list[asyncio.Task[RequestResult]] = []
        lates: list[float] = []
        begun_s = perf_counter()
        async with asyncio.TaskGroup() as group:
            for at_s, ask in plan:
                if (ahead_s := begun_s + at_s - perf_counter()) > 0:
                    await asyncio.sleep(ahead_s)
                lates.append(max(0.0, perf_counter() - begun_s - at_s))
                tasks.append(group.create_task(client.generate(ask.prompt, ask.options())))
        return [task.result() for task in tasks], lates


def arrivals_of(seed: str, rate: float, seconds: float) -> list[float]:
    """Times of a Poisson process in [0, seconds)."""
    rng = random.Random(f"{seed}/arrivals")
    at_s, moments = rng.expovariate(rate), []
    while at_s < seconds:
        moments.append(at_s)
        at_s += rng.expovariate(rate)
    return moments


def divide(records: Sequence[RequestResult]) -> tuple[list[RequestResult], list[RequestResult], list[RequestResult]]:
    """Requests answered with 503, served requests, and all others."""
    refused: list[RequestResult] = []
    admitted: list[RequestResult] = []
    failed: list[RequestResult] = []
    for record in records:
        if record.error is None and record.arrivals:
            admitted.append(record)
        elif record.error is not None and record.error.startswith("503: "):
            refused.append(record)
        else:
            failed.append(record)
    return refused, admitted, failed


def ttft_bound_ms(num_open: int, num_rows: int, requests_per_s: float, ttft_ms: float) -> float:
    """Longest time that an admitted request should wait for its first token; see the module's docstring."""
    waiting = max(0, num_open - num_rows)
    return ttft_ms + (1000 * waiting / requests_per_s if requests_per_s > 0 else float("inf"))
