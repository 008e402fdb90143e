"""`shared`: 16 streams that share a prefix of 600 words, 50 words of their own, 64 tokens out: total tokens/s.

Runs `pipeline bench --shared --temperature 0` against a fresh server in each round. --set changes its settings.

Bound: the median of the rounds is at least 6,000 total tok/s (the goal is 10,000); --least says otherwise.
"""

import argparse
import subprocess
import sys
from statistics import median

import msgspec

from pipeline.cli.bench.measure import Summary
from pipeline.cli.bench.report import BenchReport
from pipeline.errors import UserError
from tools.benchmarks import report
from tools.benchmarks.pairs import Reading
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.served import ROOT, Served

LEAST = 6000.0
GOAL = 10000.0


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=3, seconds=20.0)
    parser.add_argument("--least", type=float, default=LEAST, help="total tok/s for --check; by default %(default)g")


def run(args: argparse.Namespace) -> int:
    found = BenchmarkReport("shared", args)
    rows: list[Reading] = []
    for number in range(args.rounds):
        found.tell(f"round {number + 1} of {args.rounds}")
        with Served(*args.set) as server:
            summary = _bench(server.url, args.seconds, args.seed + number)
            schedule = server.schedule()
        found.errors.update(summary.errors)
        rows.append(
            {
                "total tok/s": summary.total_tokens_per_s,
                "output tok/s": summary.output_tokens_per_s,
                "TTFT p50 ms": summary.ttft_ms.p50,
                "TTFT p99 ms": summary.ttft_ms.p99,
                "ITL p50 ms": summary.itl_ms.p50,
                "ITL p99 ms": summary.itl_ms.p99,
                "cached %": 100 * schedule.num_cached_tokens / max(1, schedule.num_prompt_tokens),
            }
        )
    found.readings("a shared prefix", rows)
    rate = median(row["total tok/s"] for row in rows)
    found.verdicts.append(Verdict("total tokens/s, median", rate, ">=", args.least))
    found.note("goal", GOAL, f"the goal is {GOAL:,.0f} total tok/s")
    return found.finish()


def _bench(url: str, seconds: float, seed: int) -> Summary:
    command = [sys.executable, "-m", "pipeline", "bench", "--shared", "--temperature", "0", "--url", url]
    command += ["--duration", f"{seconds:g}s", "--seed", str(seed), "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600 + 10 * seconds, check=False)
    if not done.stdout:
        raise UserError(f"pipeline bench failed:\n{done.stderr.decode(errors='replace')}")
    (level,) = msgspec.json.decode(done.stdout, type=BenchReport).levels
    return level
