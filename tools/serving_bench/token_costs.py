#!/usr/bin/env python3
"""Measures what a token costs besides computing it: CPU time of each process, context switches, gaps between steps.

    tools/serving_bench/token_costs.py                            1, 8 and 32 streams
    tools/serving_bench/token_costs.py --streams 1 --rounds 3
    tools/serving_bench/token_costs.py --against ../other-tree    alternate with another working tree: A B B A …
    tools/serving_bench/token_costs.py --against-set schedule.max_steps_in_flight=2    alternate with other settings
    tools/serving_bench/token_costs.py --check

It starts the servers itself, and loads one at a time with streams at temperature 0 that outlast the measurement. CPU
time and context switches are the kernel's, of all threads of a process and of its children. A gap is the time from the
end of a step to the start of the next, from a trace that is recorded after the CPU time was read.

--check: exit with 1 if the processes besides execute use more than 0.8 core-ms per token with one stream, or if the
median gap exceeds 0.5 ms.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.cli import option_types as types  # noqa: E402
from pipeline.cli.bench.client import BenchClient, open_session  # noqa: E402
from pipeline.cli.bench.measure import percentile  # noqa: E402
from pipeline.cli.bench.tally import Tally  # noqa: E402
from pipeline.errors import UserError  # noqa: E402
from pipeline.runtime import messages as m  # noqa: E402
from pipeline.runtime.tracing import StageTrace, TraceEvent  # noqa: E402
from tools.benchmarks.pairs import Comparison, Reading, compare  # noqa: E402
from tools.benchmarks.report import BenchmarkReport, Verdict, add_common, with_seed  # noqa: E402
from tools.benchmarks.served import Served, exit_code  # noqa: E402

MAX_CORE_US = 800.0
MAX_GAP_US = 500.0
TRACE_S = 2.0
BEGIN_S = 60.0
"""Longest time until all streams have text."""
TIMEOUT_S = 600.0
SETTLE_S = 0.5
"""After all streams have begun, before the measurement."""
PROMPT = "Tell a long story about number {}, a sailor, and the sea."
EXECUTE = "execute.0"


class Usage(msgspec.Struct, frozen=True):
    """Of a process, all its threads."""

    cpu_us: float
    num_switches: int
    """Voluntary context switches: how often a thread went to sleep."""


def usage_of(pid: int) -> Usage:
    """The resources that a process and its descendants have used; those of threads that have ended do not count."""
    cpu_us, num_switches = 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            for task in Path(f"/proc/{one.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    cpu_us += int((task / "schedstat").read_text().split()[0]) / 1000
                    num_switches += _voluntary_switches((task / "status").read_text())
    return Usage(cpu_us, num_switches)


def _voluntary_switches(status: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


def usages(server: Served) -> dict[str, Usage]:
    """By process. The supervisor's children count for themselves."""
    each = {name: usage_of(pid) for name, pid in server.pids.items()}
    supervisor = psutil.Process(server.pid)
    own = Usage(0.0, 0)
    for task in Path(f"/proc/{supervisor.pid}/task").iterdir():
        run_ns = int((task / "schedstat").read_text().split()[0])
        switches = _voluntary_switches((task / "status").read_text())
        own = Usage(own.cpu_us + run_ns / 1000, own.num_switches + switches)
    return each | {"supervisor.0": own}


# ------------------------------------------------------------------------------------------------------------ traces


def gaps_us(steps: list[TraceEvent]) -> list[float]:
    """Times from the end of a step to the start of the next, of the executor's spans."""
    return [1e6 * (then.begin_s - before.end_s) for before, then in pairwise(steps)]


def parts_us(traces: dict[str, StageTrace]) -> dict[str, float]:
    """The median parts of a gap: the result's way to schedule's loop, settling if that comes before the next plan,
    planning, and the step's way back. Empty if several steps are in flight, because then a step is not planned in the
    gap before it."""
    steps = {event.args["step"]: event for event in spans(traces[EXECUTE], "step")}
    settled = {event.args["step"]: event for event in spans(traces["schedule.0"], "settle")}
    planned = {event.args["step"]: event for event in spans(traces["schedule.0"], "plan")}
    parts: dict[str, list[float]] = {}
    for step_id, step in steps.items():
        before, settle, plan = steps.get(_before(step_id)), settled.get(_before(step_id)), planned.get(step_id)
        if before is None or settle is None or plan is None or plan.begin_s < before.end_s:
            continue
        begins_s = min(settle.begin_s, plan.begin_s)
        times = (before.end_s, begins_s, plan.begin_s, plan.end_s, step.begin_s)
        names = ("result to schedule", "settle", "plan", "step to execute")
        for name, (begin_s, end_s) in zip(names, pairwise(times), strict=True):
            parts.setdefault(name, []).append(1e6 * (end_s - begin_s))
    return {name: median(values) for name, values in parts.items()}


def _before(step_id: int | float | str) -> int:
    return int(step_id) - 1


def spans(trace: StageTrace, name: str) -> list[TraceEvent]:
    return [event for event in trace.records if event.name == name and event.end_s]


# ----------------------------------------------------------------------------------------------------------- measure


class _Begun(Tally):
    """A tally that says when the first text arrives."""

    def __init__(self) -> None:
        super().__init__("completions")
        self.begun = asyncio.Event()

    def feed(self, data: bytes, now_s: float) -> None:
        super().feed(data, now_s)
        if self.arrivals:
            self.begun.set()


@contextlib.asynccontextmanager
async def _streams(url: str, num: int, seed: int, num_tokens: int) -> AsyncIterator[None]:
    """`num` streams that have all begun; they are cancelled at the end. Raises UserError if one ended before."""
    async with open_session(None, TIMEOUT_S) as session:
        client = BenchClient(session, url, "", "completions")
        await client.find_model()
        options = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        tallies = [_Begun() for _ in range(num)]
        tasks = [
            asyncio.create_task(client.generate(PROMPT.format(seed + index), options, tally))
            for index, tally in enumerate(tallies)
        ]
        try:
            async with asyncio.timeout(BEGIN_S):
                for tally in tallies:
                    await tally.begun.wait()
            await asyncio.sleep(SETTLE_S)
            yield
            for task in tasks:
                if task.done():
                    raise UserError(f"a stream ended too soon: use shorter --seconds ({task.result().error})")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure(server: Served, num: int, seconds: float, seed: int, num_tokens: int) -> Reading:
    """One level on one server. All times are in µs."""
    async with _streams(server.url, num, seed, num_tokens):
        before, counts = usages(server), server.schedule()
        begin_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        after, now = usages(server), server.schedule()
        took_s = asyncio.get_running_loop().time() - begin_s
        server.command(m.Trace(0, TRACE_S + 5.0))
        await asyncio.sleep(TRACE_S)
        traces = {
            name: msgspec.msgpack.decode(body, type=StageTrace) for name, body in server.command(m.TakeTrace(0)).items()
        }
    num_tokens = max(1, now.num_output_tokens - counts.num_output_tokens)
    found = sorted(gaps_us(spans(traces[EXECUTE], "step")))
    reading = {"tokens/s": num_tokens / took_s, "gap p50": percentile(found, 0.5), "gap p90": percentile(found, 0.9)}
    reading |= parts_us(traces)
    reading["all but execute"] = 0.0
    for name in sorted(after, key=lambda name: name != EXECUTE):
        cpu_us = (after[name].cpu_us - before[name].cpu_us) / num_tokens
        reading[f"{name} CPU"] = cpu_us
        reading["all but execute"] += cpu_us * (name != EXECUTE)
    for name in after:
        reading[f"{name} sleeps"] = (after[name].num_switches - before[name].num_switches) / num_tokens
    return reading


# ----------------------------------------------------------------------------------------------------------- command


def run(args: argparse.Namespace) -> int:
    """Measure each level. Returns the exit code. Raises UserError, ServerError and ConfigError."""
    report = BenchmarkReport("token-costs", args)
    report.note("cpu", _cpu_model(), f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores")
    arms = [(ROOT, args.set)]
    if args.against or args.against_set:
        tree = args.against.resolve() if args.against else ROOT
        arms = [(tree, args.set + args.against_set), *arms]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Served(*sets, root=tree)) for tree, sets in arms]
        for server in servers:  # the first steps compile and allocate
            asyncio.run(measure(server, 1, 0.5, args.seed, args.tokens))
        for num in args.streams:
            _level(report, args, num, servers)
    return report.finish()


def with_common_figures(comparison: Comparison) -> Comparison:
    """Only the figures that all readings have: a gap has no parts if several steps are in flight."""
    every = [reading for arm in comparison.readings for reading in arm]
    names = [name for name in every[0] if all(name in reading for reading in every)]
    first, second = ([{name: reading[name] for name in names} for reading in arm] for arm in comparison.readings)
    return Comparison(comparison.names, (first, second))


def _level(report: BenchmarkReport, args: argparse.Namespace, num: int, servers: list[Served]) -> None:
    def one(arm: int, number: int) -> Reading:
        return asyncio.run(measure(servers[arm], num, args.seconds, args.seed + 1000 * number, args.tokens))

    title = f"{num} stream{'s' * (num > 1)}, µs"
    if len(servers) == 1:
        rows = []
        for number in range(args.rounds):
            report.tell(f"{title}: round {number + 1} of {args.rounds}")
            rows.append(one(0, number))
        last = {name: median(row[name] for row in rows) for name in rows[0]}
        report.figures(title, last)
    else:
        comparison = with_common_figures(compare(("other", "this"), args.rounds, one, report.tell))
        report.comparison(title, comparison)
        last = {name: comparison.median(1, name) for name in comparison.figures()}
    report.verdicts.append(Verdict(f"median gap with {title}", last["gap p50"], "<=", MAX_GAP_US))
    if num == 1:
        report.verdicts.append(
            Verdict("core-µs per token, all but execute", last["all but execute"], "<=", MAX_CORE_US)
        )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams",
        type=lambda text: [types.positive(one) for one in text.split(",")],
        default=[1, 8, 32],
        metavar="N,N",
        help="numbers of streams; by default 1,8,32",
    )
    parser.add_argument("--against", type=Path, metavar="TREE", help="another working tree with the same tools")
    parser.add_argument(
        "--against-set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the other server only"
    )
    parser.add_argument("--tokens", type=types.positive, default=1900, metavar="N", help="output tokens of a stream")
    add_common(parser, rounds=3, seconds=5.0)
    args = with_seed(parser.parse_args(arguments))
    return exit_code("token_costs", lambda: run(args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
