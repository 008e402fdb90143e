"""Runs the loads against one server at a time."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.cli.bench.report import BenchReport
from pipeline.errors import UserError
from tools.compare_peers import children
from tools.compare_peers.children import Tell
from tools.compare_peers.loads import Load, bench_command, deadline_s
from tools.compare_peers.peers import LLAMA_CPP, Peer

LLAMA_BENCH_S = 300.0
BENCH_CODES = (0, 1)
"""1: some requests failed. The report says how many."""


class Plan(msgspec.Struct, frozen=True):
    """What is measured, of each server and in each round."""

    peers: list[Peer]
    loads: list[Load]
    temperatures: tuple[float, ...]
    duration_s: float
    rounds: int
    seed: int
    out: str
    """The output folder, absolute."""


class Run(msgspec.Struct, frozen=True):
    """The results of one server in one round."""

    server: str
    round: int
    start_s: float
    """Seconds from the start until /health answered 200."""
    reports: dict[str, BenchReport]
    """By load."""
    commands: list[list[str]]
    """The server's, then those that measured it."""
    engine: Any = None
    """What llama-bench, which has no server, reports of llama.cpp."""


class Failure(msgspec.Struct, frozen=True):
    """A server that could not be measured in a round."""

    server: str
    round: int
    error: str


def measure(
    plan: Plan, earlier: Sequence[Run], tell: Tell, keep: Callable[[Sequence[Run], Sequence[Failure]], None]
) -> tuple[list[Run], list[Failure]]:
    """Measure all servers, except in rounds that `earlier` has. A server that fails is reported, and the others are
    measured. `keep` gets all results so far after each server, so that an interruption does not lose them."""
    runs = list(earlier)
    failures: list[Failure] = []
    for number in range(plan.rounds):
        for peer in plan.peers if number % 2 == 0 else reversed(plan.peers):
            if any((run.server, run.round) == (peer.name, number) for run in earlier):
                continue
            tell(f"{peer.label}{f', round {number + 1} of {plan.rounds}' if plan.rounds > 1 else ''}")
            try:
                runs.append(measure_server(plan, peer, number, tell))
            except UserError as error:
                failures.append(Failure(peer.name, number, str(error)))
                tell(f"  error: {error}")
            keep(runs, failures)
    return runs, failures


def measure_server(plan: Plan, peer: Peer, number: int, tell: Tell) -> Run:
    """Start a server, run all loads, and end it. Raises UserError."""
    logs = Path(plan.out) / "logs"
    reports: dict[str, BenchReport] = {}
    commands: list[list[str]] = []
    with children.serving(
        peer.label, peer.command, logs / f"{peer.name}-{number}.log", peer.start_s, tell, peer.env
    ) as server:
        tell(f"  ready after {server.start_s:.1f} s")
        commands.append(server.command)
        for load in plan.loads:
            command = _bench_command(plan, peer, load, server.url, number)
            commands.append(command)
            reports[load.name] = _bench(plan, peer, load, command, number, tell)
    engine = None
    if peer.name == LLAMA_CPP and Path(llama_bench_command(peer)[0]).is_file():  # some packages have only the server
        commands.append(llama_bench_command(peer))
        engine = _llama_bench(commands[-1], logs, tell)
    return Run(peer.name, number, server.start_s, reports, commands, engine)


def _bench_command(plan: Plan, peer: Peer, load: Load, url: str, number: int) -> list[str]:
    # Each round has its own prompts, as each run of `pipeline bench` does.
    result = Path(plan.out) / "results" / f"{peer.name}-{load.name}-{number}.json"
    return bench_command(load, url, plan.temperatures, plan.duration_s, plan.seed + number, result)


def _bench(plan: Plan, peer: Peer, load: Load, command: list[str], number: int, tell: Tell) -> BenchReport:
    result = Path(command[command.index("--json") + 1])
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    name = f"{load.name} with {peer.label}"
    log = Path(plan.out) / "logs" / f"{peer.name}-{load.name}-{number}.log"
    deadline = deadline_s(load, plan.temperatures, plan.duration_s)
    children.run(name, command, log, deadline, tell, codes=BENCH_CODES)
    if not result.is_file():
        raise UserError(f"{name}: failed\n{log.read_text(encoding='utf-8', errors='replace').strip()}")
    report = msgspec.json.decode(result.read_bytes(), type=BenchReport)
    for level in report.levels:
        failed = f", {level.num_errors} requests failed: {level.errors}" if level.num_errors else ""
        tell(
            f"  {load.name}, {level.concurrency} streams, temperature {level.temperature:g}: "
            f"{getattr(level, load.figure):,.1f} {load.unit}{failed}"
        )
    return report


def llama_bench_command(peer: Peer) -> list[str]:
    """llama.cpp's own benchmark with the same model and number of threads."""
    program = Path(peer.command[0]).with_name("llama-bench")
    model, threads = (peer.command[peer.command.index(option) + 1] for option in ("--model", "--threads"))
    return [str(program), "-m", model, "-t", threads, "-p", "128", "-n", "128", "-r", "3", "-o", "json"]


def _llama_bench(command: list[str], logs: Path, tell: Tell) -> Any:
    """The speed of llama.cpp without its server, to see what that costs; None if it fails."""
    log = logs / "llama-bench.log"
    try:
        children.run("llama-bench", command, log, LLAMA_BENCH_S, tell)
        text = log.read_text(encoding="utf-8", errors="replace")
        found, _ = json.JSONDecoder().raw_decode(text, text.index("[\n"))  # log lines surround it
        for one in found:
            kind = f"prompt of {one['n_prompt']}" if one["n_prompt"] else f"{one['n_gen']} tokens out"
            tell(f"  llama-bench, {kind}: {one['avg_ts']:,.1f} tok/s")
    except (UserError, ValueError, KeyError, TypeError) as error:
        tell(f"  llama-bench: no figures: {error}")
        return None
    return found
