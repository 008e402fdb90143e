"""Simulates many servers behind a router, and answers how many of them a traffic needs.

    python -m tools.simulator run --trace traffic.jsonl --replica server.json --p99-ttft 2s
    python -m tools.simulator run --synthetic shared --rate 1200 --replicas 256 --policy all --plot policies.svg
    python -m tools.simulator run --trace mooncake.jsonl --speed 4 --replicas 16,32,64 --json result.json
    python -m tools.simulator check --synthetic chat --requests 1000 --rate 8 --replicas 2
    python -m tools.simulator route --synthetic shared --block-tokens 256 --replicas 10,100,1000
    python -m tools.simulator make --synthetic chat --requests 1000 --out chat.jsonl

`run` simulates by discrete events. Routing and admission are the server's code; a replica follows the scheduler's rules
by counts. `check` simulates the same requests with the real scheduler too, and compares: the hit rate must agree within
2 points, the median time to first token within 10 %. It exits with 1 if they do not. `route` measures what a router
costs: CPU time of a request, and memory. `make` writes a synthetic trace.

`pipeline record traffic` records a trace and the speed of a running server (docs/scale.md).
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from pipeline.cli.out_file import require_writable, write_output, writing
from pipeline.cli.replay.traffic_command import write_trace
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile
from tools.simulator import options, route_cost
from tools.simulator.plot import chart_of
from tools.simulator.requests import Trace, records_of
from tools.simulator.search import find_replicas
from tools.simulator.simulation import Setup, Simulation
from tools.simulator.summary import Summary, describe, seconds, summarize, table

MAX_HIT_POINTS = 2.0
MAX_TTFT_PART = 0.10
FAILED, USAGE, INTERRUPTED = 1, 2, 130


def run(args: argparse.Namespace) -> int:
    """Simulate. Returns 1 if no number of replicas is enough."""
    for path, option in ((args.json, "--json"), (args.plot, "--plot")):
        if path is not None:
            require_writable(path, option)
    trace, profile = options.trace_from(args), options.profile_from(args)
    print(describe(trace))
    summaries: list[Summary] = []
    verdicts: list[str] = []
    is_enough = True
    for policy in options.policies_from(args):

        def simulate(num_replicas: int, policy: str = policy) -> Summary:
            return summarize(trace, Simulation(trace, _setup(args, profile, policy, num_replicas)).run())

        if args.p99_ttft is None:
            summaries += [simulate(num) for num in args.replicas]
            continue
        # With as many replicas as requests, none waits for another.
        most = min(options.MAX_REPLICAS, len(trace.requests))
        found, tried = find_replicas(simulate, args.p99_ttft, most)
        summaries += tried
        is_enough &= found is not None
        verdicts.append(f"{policy}: {found:,} replicas" if found else f"{policy}: even {most:,} replicas are too few")
    print(table(summaries))
    for verdict in verdicts:
        print(f"{verdict} for a p99 TTFT of {seconds(args.p99_ttft)}")
    _write(args, trace, summaries)
    return 0 if is_enough else FAILED


def check(args: argparse.Namespace) -> int:
    """Compare with the real scheduler. Returns 1 if they differ too much."""
    trace, profile = options.trace_from(args), options.profile_from(args)
    print(describe(trace))
    is_alike = True
    for policy in options.policies_from(args):
        for num_replicas in args.replicas:
            setup = _setup(args, profile, policy, num_replicas)
            fast = summarize(trace, Simulation(trace, setup).run())
            real = summarize(trace, Simulation(trace, msgspec.structs.replace(setup, is_real=True)).run())
            print(f"by counts, then with the real scheduler:\n{table([fast, real])}")
            points = 100 * (fast.hit_rate - real.hit_rate)
            part = fast.ttft_p50_s / real.ttft_p50_s - 1
            print(f"hit rate {points:+.2f} points, TTFT p50 {100 * part:+.1f} %, in {real.took_s:.1f} s")
            is_alike &= abs(points) <= MAX_HIT_POINTS and abs(part) <= MAX_TTFT_PART
    return 0 if is_alike else FAILED


def route(args: argparse.Namespace) -> int:
    """Measure routers."""
    trace, profile = options.trace_from(args), options.profile_from(args)
    costs = [
        route_cost.measure(trace, profile, num, policy, args.seed)
        for policy in options.policies_from(args)
        for num in args.replicas
    ]
    print(route_cost.table(costs))
    return 0


def make(args: argparse.Namespace) -> int:
    """Write a trace."""
    require_writable(args.out, "--out")
    trace = options.trace_from(args)
    with writing(args.out, "--out"):
        write_trace(args.out, records_of(trace))
    print(f"{args.out}: {describe(trace)}")
    return 0


def _setup(args: argparse.Namespace, profile: ReplicaProfile, policy: str, num_replicas: int) -> Setup:
    return Setup(
        num_replicas,
        profile,
        policy,
        num_routers=args.routers,
        num_cells=args.cells,
        weight=args.weight,
        learns=args.learn,
        overhead_s=args.overhead_ms / 1000,
        seed=args.seed,
    )


def _write(args: argparse.Namespace, trace: Trace, summaries: list[Summary]) -> None:
    if args.json is not None:
        with writing(args.json, "--json"):
            write_output(args.json, msgspec.json.encode(summaries))
    if args.plot is not None:
        chart = chart_of(summaries, "Replicas for this traffic", describe(trace).replace("\n", " "))
        with writing(args.plot, "--plot"):
            write_output(args.plot, chart.as_svg())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m tools.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    subjects = (
        (run, "simulate replicas"),
        (check, "compare with the real scheduler"),
        (route, "measure what a router costs"),
    )
    for function, words in subjects:
        one = commands.add_parser(function.__name__, help=words, allow_abbrev=False)
        options.add_trace_options(one)
        options.add_replica_options(one)
        options.add_routing_options(one)
        if function is run:
            options.add_size_options(one)
            one.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
            one.add_argument("--plot", type=Path, metavar="FILE", help="write a chart to FILE, as SVG")
        else:
            one.add_argument("--replicas", type=options.replicas, required=True, metavar="N,N")
        one.set_defaults(run=function)
    one = commands.add_parser("make", help="write a synthetic trace", allow_abbrev=False)
    options.add_trace_options(one)
    one.add_argument("--out", type=Path, required=True, metavar="FILE")
    one.set_defaults(run=make)
    return found


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except UserError as error:
        print(f"simulator: error: {error}", file=sys.stderr)
        return USAGE
    except ConfigError as error:
        print(f"simulator: error: {'; '.join(error.problems)}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of our output is gone. Without this, Python would report the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
