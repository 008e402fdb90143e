"""`pipeline profile pipeline`: the whole chain, with an instant executor and clients that discard what they read.

Starts a real server like `pipeline serve --instant`. This process is all its clients: streaming over HTTP, it only
counts events. The scheduler counts tokens. The cost of a token is given as CPU time of each process, which is more
reliable on a busy machine than tokens per second.
"""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
from rich.table import Table

from pipeline.cli.complain import complain
from pipeline.cli.json_output import require_json_writable, write_json
from pipeline.cli.profile.alone.clock import ProcessTimes, used
from pipeline.cli.profile.alone.command import Tell, progress_of
from pipeline.cli.profile.alone.http import Sink
from pipeline.cli.profile.report import console
from pipeline.errors import UserError
from pipeline.metrics.stats import ScheduleCounts
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from pipeline.version import VERSION

START_S = 120.0
STOP_S = 20.0
EVENT = b"data: "
READ_EVERY_S = 0.005
"""Interval at which clients read. Data that arrives meanwhile waits in the kernel."""


class StageShare(msgspec.Struct, frozen=True):
    name: str
    cpu_s: float
    busy: float
    """Share of the time in which its main thread was busy."""
    cpu_us_per_token: float


class ChainProfile(msgspec.Struct, frozen=True):
    version: str
    model: str
    num_cores: int
    num_streams: int
    num_output: int
    seconds: float
    num_tokens: int
    num_calls: int
    num_steps: int
    num_events: int
    """Events sent to clients. Tokens that arrive while the gateway is busy share one."""
    stages: list[StageShare]
    """The supervisor and the stages in flow order, then the clients."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run(args: argparse.Namespace, options: list[str]) -> int:
    """Measure and report. `options` are those of `pipeline serve`. Returns 1 if the server fails. Raises
    ConfigError."""
    require_json_writable(args.json)
    try:
        with progress_of("chain") as tell:
            result = measure(options, args.streams, args.tokens, args.seconds, args.warmup, tell)
    except UserError as error:
        complain("pipeline profile", error)
        return 1
    screen = console()

    def show() -> None:
        screen.print(_title(result), soft_wrap=True)
        screen.print(_table(result))

    write_json(args.json, result, show)
    return 0


def measure(
    options: list[str], num_streams: int, num_output: int, seconds: float, warmup_s: float, tell: Tell
) -> ChainProfile:
    """Start a server with these options of `serve`, and measure it. Raises UserError."""
    tell("starting", 0)
    command = [sys.executable, "-m", "pipeline", "serve", "--instant", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as server:
        try:
            address = _wait_until_ready(server)
            (name,) = [name for name in find_servers() if name.startswith(f"{server.pid}-")]
            with Admin(name) as admin:
                return _measure(admin, address, num_streams, num_output, seconds, warmup_s, tell)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_ready(server: "subprocess.Popen[bytes]") -> tuple[str, int]:
    """The address in the server's log. Raises UserError with the log if the server ends first."""
    assert server.stderr is not None
    os.set_blocking(server.stderr.fileno(), False)
    log = b""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        log += server.stderr.read() or b""
        if match := re.search(rb"ready on http://\[?([^\s\]]+?)\]?:(\d+)\s", log):
            return match[1].decode(), int(match[2])
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise UserError(f"the server did not start:\n{log.decode(errors='replace')}")


def _measure(
    admin: Admin,
    address: tuple[str, int],
    num_streams: int,
    num_output: int,
    seconds: float,
    warmup_s: float,
    tell: Tell,
) -> ChainProfile:
    stats = admin.stats()
    pids = {stage.name: stage.pid for stage in stats.stages}
    sink = Sink(address, stats.model, num_streams, num_output, mark=EVENT)
    try:
        _turn(sink, warmup_s, lambda share: tell("warming up", share))
        before = _reading(admin, pids, sink)
        _turn(sink, seconds, lambda share: tell("measuring", share))
        after = _reading(admin, pids, sink)
    finally:
        sink.close()
    took_s = after.at_s - before.at_s
    num_tokens = after.num_tokens - before.num_tokens
    shares = []
    for name in (*pids, "clients"):
        part = after.used[name].since(before.used[name])
        shares.append(
            StageShare(name, part.cpu_s, part.main_cpu_s / took_s, 1e6 * part.cpu_s / max(1, num_tokens)),
        )
    return ChainProfile(
        version=VERSION,
        model=stats.model,
        num_cores=len(os.sched_getaffinity(0)),
        num_streams=num_streams,
        num_output=num_output,
        seconds=took_s,
        num_tokens=num_tokens,
        num_calls=after.num_calls - before.num_calls,
        num_steps=after.num_steps - before.num_steps,
        num_events=after.num_events - before.num_events,
        stages=shares,
    )


class _Reading(msgspec.Struct, frozen=True):
    at_s: float
    num_tokens: int
    num_steps: int
    num_calls: int
    num_events: int
    used: dict[str, ProcessTimes]


def _reading(admin: Admin, pids: dict[str, int], sink: Sink) -> _Reading:
    counts = {stage.name: stage.counts for stage in admin.stats().stages}
    schedule = counts["schedule.0"]
    assert schedule is not None and isinstance(schedule.own, ScheduleCounts)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own_s = usage.ru_utime + usage.ru_stime
    everybody = {name: used(pid) for name, pid in pids.items()}
    everybody["clients"] = ProcessTimes(own_s, own_s, 0.0)
    own = schedule.own
    return _Reading(time.monotonic(), own.num_output_tokens, own.num_steps, sink.num_calls, sink.num_tokens, everybody)


def _turn(sink: Sink, seconds: float, tell: Callable[[float], None]) -> None:
    begun = time.monotonic()
    while (passed_s := time.monotonic() - begun) < seconds:
        sink.open_calls()
        sink.read(READ_EVERY_S)
        time.sleep(READ_EVERY_S)
        tell(passed_s / seconds)


def _title(profile: ChainProfile) -> str:
    return (
        f"{profile.tokens_per_s:,.0f} tokens/s: {profile.num_streams} streams of {profile.num_output} tokens, "
        f"{profile.seconds:.1f} s, {profile.num_cores} cores, instant executor"
    )


def _table(profile: ChainProfile) -> Table:
    table = Table()
    for heading in ("", "busy", "CPU µs per token"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for one in profile.stages:
        table.add_row(one.name, f"{100 * one.busy:.0f} %", f"{one.cpu_us_per_token:,.2f}")
    cpu_s = sum(one.cpu_s for one in profile.stages)
    busy = 100 * cpu_s / profile.seconds / profile.num_cores
    table.add_section()
    table.add_row("all, of all cores", f"{busy:.0f} %", f"{1e6 * cpu_s / max(1, profile.num_tokens):,.2f}")
    per_step = profile.num_tokens / max(1, profile.num_steps)
    table.add_row("tokens a step", "", f"{per_step:,.1f}")
    table.add_row("tokens an event", "", f"{profile.num_tokens / max(1, profile.num_events):,.1f}")
    return table
