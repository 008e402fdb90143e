"""`memory`: KV memory for a quarter of the load: preemption `auto` with swap space against `recompute`.

16 streams in a closed loop, with unrelated prompts of 700 to 1,200 tokens, and 512 to 1,024 tokens out. The KV memory
is a quarter of what all streams need at their ends, so six or seven of them start, grow, and preempt each other. This
needs long outputs: a sequence starts only if its prompt fits, and outputs of 128 to 256 tokens grow too little (see
--output 128-256). Each round starts a new server for each arm, with the same prompts for both. Preemptions and blocks
count from the first request to the last, including warm-up; tokens/s and TTFT are measured like in `pipeline bench`.

"work" is the number of positions computed per token of prompts and outputs. Above 1 is recomputation; prefix-cache hits
reduce it.

Bounds: `auto` has more tokens/s and a lower p99 TTFT, by the medians of the rounds' ratios. Both arms preempt, and
`auto` swaps.
"""

import argparse
import asyncio
from collections import Counter

from pipeline.cli import option_types as types
from pipeline.cli.bench.measure import Summary
from tools.benchmarks import report
from tools.benchmarks.loads import BenchmarkLoad, Span, closed_loop, span
from tools.benchmarks.pairs import Reading, compare
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.served import Served

ARMS = ("recompute", "auto")
PROMPT, OUTPUT = Span(700, 1200), Span(512, 1024)
PROBE_BYTES = 64 * 1024**2
SWAP_FACTOR = 1.0
"""Swap space per byte of the whole load's KV memory: enough for all of it."""


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=3, seconds=60.0)
    parser.add_argument("--streams", type=types.positive, default=16, metavar="N", help="by default %(default)s")
    parser.add_argument("--prompt", type=span, default=PROMPT, metavar="LEAST-MOST", help="tokens; by default 700-1200")
    parser.add_argument("--output", type=span, default=OUTPUT, metavar="LEAST-MOST", help="tokens; by default 512-1024")
    parser.add_argument(
        "--share",
        type=types.share,
        default=0.25,
        metavar="PART",
        help="of the KV memory that all streams need at their ends; by default %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    found = BenchmarkReport("memory", args)
    block_bytes, block_size = block_of(args.set)
    load = BenchmarkLoad(args.streams, args.prompt, args.output, args.seconds, str(args.seed))
    kv_bytes, swap_bytes = sizes(load, args.share, block_bytes, block_size)
    found.note(
        "kv_cache_bytes",
        kv_bytes,
        f"{load.num_streams} streams need {load.num_streams * load.mean_tokens:,.0f} tokens of KV memory at their "
        f"ends; there is room for {kv_bytes / block_bytes * block_size:,.0f} ({kv_bytes / 1e6:.0f} MB), and swap space "
        f"of {swap_bytes / 1e6:.0f} MB",
    )

    def measure(arm: int, number: int) -> Reading:
        sets = [*args.set, f"execute.kv_cache_bytes={kv_bytes}", f"schedule.preemption={ARMS[arm]}"]
        sets.append(f"execute.swap_bytes={swap_bytes if ARMS[arm] == 'auto' else 0}")
        with Served(*sets) as server:
            mine = BenchmarkLoad(load.num_streams, load.prompt, load.output, load.seconds, f"{load.seed}/{number}")
            summary = asyncio.run(closed_loop(server.url, mine))
            found.errors += Counter(summary.errors)
            return reading_of(summary, server)

    comparison = compare(ARMS, args.rounds, measure, found.tell)
    found.comparison("KV memory for a part of the load", comparison)
    tokens, ttft = comparison.ratio("output tok/s"), comparison.ratio("TTFT p99 ms")
    found.verdicts += [
        Verdict("output tokens/s of auto / recompute", tokens.median if tokens else 0.0, ">", 1.0),
        Verdict("p99 TTFT of auto / recompute", ttft.median if ttft else float("inf"), "<", 1.0),
        *(Verdict(f"preemptions of {ARMS[arm]}", comparison.median(arm, "preemptions"), ">", 0) for arm in (0, 1)),
        Verdict("blocks that auto swapped out", comparison.median(1, "blocks out"), ">", 0),
    ]
    return found.finish()


def reading_of(summary: Summary, server: Served) -> Reading:
    schedule, execute = server.schedule(), server.execute()
    return {
        "output tok/s": summary.output_tokens_per_s,
        "TTFT p50 ms": summary.ttft_ms.p50,
        "TTFT p99 ms": summary.ttft_ms.p99,
        "ITL p99 ms": summary.itl_ms.p99,
        "requests": float(summary.num_requests),
        "preemptions": float(schedule.num_preemptions),
        "blocks out": float(schedule.num_blocks_swapped_out),
        "blocks in": float(schedule.num_blocks_swapped_in),
        "work": execute.num_tokens / max(1, schedule.num_prompt_tokens + schedule.num_output_tokens),
    }


def sizes(load: BenchmarkLoad, share: float, block_bytes: float, block_size: int) -> tuple[int, int]:
    """Bytes of KV memory for a share of the load (at least its longest request), and of swap space."""
    blocks_of_all = load.num_streams * load.mean_tokens / block_size
    blocks_of_longest = (load.prompt.most + load.output.most) / block_size + 2
    kv_blocks = max(share * blocks_of_all, blocks_of_longest)
    return round(kv_blocks * block_bytes), round(SWAP_FACTOR * blocks_of_all * block_bytes)


def block_of(sets: list[str]) -> tuple[float, int]:
    """(bytes, tokens) of a block on a server with these settings."""
    with Served(*sets, f"execute.kv_cache_bytes={PROBE_BYTES}") as server:
        stats = server.stats()
        return PROBE_BYTES / stats.num_blocks, stats.block_size
