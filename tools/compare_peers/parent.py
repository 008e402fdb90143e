"""The order of a comparison: options, builds, model, measurements, results."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from pipeline.cli.bench.report import console
from pipeline.cli.out_file import write_output
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.stages.prepare.cache import Cache
from tools.benchmarks.served import ending_in_order
from tools.compare_peers import children, llama_cpp, measure, options
from tools.compare_peers.children import Tell
from tools.compare_peers.llama_cpp import LlamaCpp
from tools.compare_peers.loads import bench_command, loads_of, longest_tokens
from tools.compare_peers.machine import Commit, Machine, now
from tools.compare_peers.measure import Failure, Plan, Run, llama_bench_command
from tools.compare_peers.model import ModelPaths, make_folder, make_gguf, weights_of
from tools.compare_peers.peers import LLAMA_CPP, VLLM, Peer, Programs, peers_of
from tools.compare_peers.report import Provenance, Results, Stored
from tools.compare_peers.vllm_cpu import VERSION_OF_VLLM, VllmCpu

VERSION_S = 120.0
TABLE_WIDTH = 110


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, 1 if a server or a request failed, or 2 if nothing could be measured."""
    args = options.parse(arguments)
    progress = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        with ending_in_order():
            return _run(args, progress.print)
    except (UserError, ConfigError) as error:
        print(f"compare_peers: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, tell: Tell) -> int:
    cache = args.cache or Cache.of(Settings()).root / "peers"
    built, installed = LlamaCpp(cache, args.llama_cpp_version), VllmCpu(cache, args.vllm_version)
    programs = Programs(args.llama_server or built.server, args.vllm_python or installed.python)
    paths = ModelPaths.below(args.out)
    if args.dry_run:
        weights = weights_of(Path(args.model))
        _print_commands(args, built, installed, _plan(args, args.servers, programs, paths, weights))
        return 0
    _require(args, built)
    if LLAMA_CPP in args.servers and args.llama_server is None:
        built.make(args.out / "logs", tell)
    if VLLM in args.servers and args.vllm_python is None:
        installed.make(args.out / "logs", tell)
    if args.build_only:
        return 0
    gguf = make_gguf(args.model, paths)
    if VLLM in args.servers:
        make_folder(args.model, paths)
    earlier = _earlier(args)
    if earlier is not None:
        args.seed = earlier.plan.seed
    servers = [*args.servers, *(run.server for run in earlier.runs)] if earlier else args.servers
    plan = _plan(args, servers, programs, paths, weights_of(gguf))
    versions = (earlier.provenance.versions if earlier else {}) | _versions(args, programs, tell)
    command = [sys.executable, *sys.argv]
    provenance = Provenance(Machine.this(), Commit.this(), now(), args.model, gguf.name, versions, command)
    if earlier is not None:
        _require_same(earlier, plan, provenance)
    tell(str(provenance.machine))

    def keep(runs: Sequence[Run], failures: Sequence[Failure]) -> None:
        write_output(args.out / "results.json", Results(plan, provenance, runs, failures).as_json())

    runs, failures = measure.measure(plan, earlier.runs if earlier else [], tell, keep)
    if not runs:
        raise UserError(f"no server could be measured; see {args.out / 'logs'}")
    results = Results(plan, provenance, runs, failures)
    write_output(args.out / "tables.md", results.as_markdown())
    names = "results.json, tables.md and logs"
    if (chart := results.chart()).rows:
        write_output(args.out / "chart.svg", chart.as_svg())
        names = "results.json, tables.md, chart.svg and logs"
    console(TABLE_WIDTH).print(results.as_tables())
    tell(f"{names} are in {args.out}")
    failed = any(level.num_errors for run in runs for report in run.reports.values() for level in report.levels)
    return 1 if failures or failed else 0


def _require(args: argparse.Namespace, built: LlamaCpp) -> None:
    """Raise UserError, before anything long begins, if a program is missing or the output can't be written."""
    for option, path in (("--llama-server", args.llama_server), ("--vllm-python", args.vllm_python)):
        if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
            raise UserError(f"{option} {path}: is not a program that can be run")
    if LLAMA_CPP in args.servers and args.llama_server is None and not built.is_complete():
        llama_cpp.require_tools()
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: can't be written: {error.strerror}") from error


def _plan(
    args: argparse.Namespace, servers: Sequence[str], programs: Programs, paths: ModelPaths, weights: str
) -> Plan:
    loads = loads_of(args.loads, args.concurrency, args.endpoint, args.arrivals)
    peers = peers_of(servers, args.model, weights, paths, programs, longest_tokens(loads))
    return Plan(peers, loads, args.temperature, args.duration, args.rounds, args.seed, str(args.out))


def _earlier(args: argparse.Namespace) -> Stored | None:
    """With --resume the results in the output folder; None if it has none. Raises UserError if they can't be read."""
    path: Path = args.out / "results.json"
    if not args.resume or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stored)
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} can't be read: {error}") from error


def _require_same(earlier: Stored, plan: Plan, provenance: Provenance) -> None:
    """Raise UserError if earlier results can't be compared with new ones."""
    before, present = earlier.plan, plan
    compared = {
        "loads": (before.loads, present.loads),
        "temperatures": (before.temperatures, present.temperatures),
        "duration": (before.duration_s, present.duration_s),
        "rounds": (before.rounds, present.rounds),
        "model": (earlier.provenance.model, provenance.model),
        "machine": (earlier.provenance.machine, provenance.machine),
        "commit": (earlier.provenance.commit, provenance.commit),
    }
    if different := [name for name, (old, new) in compared.items() if old != new]:
        raise UserError(f"--resume: the results in --out were measured with another {', '.join(different)}")


def _versions(args: argparse.Namespace, programs: Programs, tell: Tell) -> dict[str, str]:
    """What the other servers report as their versions. Raises UserError if one can't be run."""
    commands = {
        LLAMA_CPP: [str(programs.llama_server), "--version"],
        VLLM: [str(programs.vllm_python), "-c", VERSION_OF_VLLM],
    }
    found = {}
    for name, command in commands.items():
        if name in args.servers:
            log: Path = args.out / "logs" / f"{name}-version.log"
            children.run(f"version of {name}", command, log, VERSION_S, tell)
            found[name] = log.read_text(encoding="utf-8", errors="replace").strip()
    return found


def _print_commands(args: argparse.Namespace, built: LlamaCpp, installed: VllmCpu, plan: Plan) -> None:
    """Print what a run would do, as shell commands."""
    if LLAMA_CPP in args.servers and args.llama_server is None and not built.is_complete():
        _print("llama.cpp", built.commands())
    if VLLM in args.servers and args.vllm_python is None and not installed.is_complete():
        _print("vLLM", installed.commands())
    if args.build_only:
        return
    for peer in plan.peers:
        port = children.free_port()
        url = f"http://127.0.0.1:{port}"
        results = [Path(plan.out) / "results" / f"{peer.name}-{load.name}-0.json" for load in plan.loads]
        commands = [_with_env(peer, children.with_port(peer.command, port))]
        commands += [
            bench_command(load, url, plan.temperatures, plan.duration_s, plan.seed, result)
            for load, result in zip(plan.loads, results, strict=True)
        ]
        if peer.name == LLAMA_CPP:
            commands.append(llama_bench_command(peer))
        _print(peer.label, commands)


def _with_env(peer: Peer, command: list[str]) -> list[str]:
    return [*(f"{name}={value}" for name, value in peer.env.items()), *command]


def _print(title: str, commands: Sequence[Sequence[str]]) -> None:
    print(f"# {title}")
    for command in commands:
        print(shlex.join(command))
    print()
