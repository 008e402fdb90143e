"""Which of this machine's running servers a command is about: `--port`, `--url` or `--pid`, or the only one."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pipeline.cli.no_server import ANY_HOST, LOOPBACK, START_ONE, host_and_port, no_server
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.supervisor.admin.admin_client import Admin, find_servers

MAX_ASKED = 32
"""Servers at once."""


def choose_server(args: argparse.Namespace, *, takes_any_model: bool = False) -> str:
    """The name of the server that the options select, or of the only one. Each of several models of a server counts as
    one, unless `takes_any_model`: all of them have its pid. Raises UserError, which lists the servers if there are
    several."""
    names = find_servers()
    if args.pid is not None:
        of_pid = [name for name in names if pid_of(name) == args.pid]
        if not of_pid:
            advice = "`pipeline ps` lists them" if names else START_ONE
            raise UserError(f"no server has pid {args.pid}; {advice}")
        if len(of_pid) == 1 and _model(args) is None:
            return of_pid[0]
    if not names:
        raise UserError(f"no server is running on this machine; {START_ONE}")
    is_any = not is_selected(args)
    if is_any and (len(names) == 1 or (takes_any_model and len({*map(pid_of, names)}) == 1)):
        return names[0]
    servers, silent = look(names)
    if is_any and len({*map(pid_of, names)}) > 1:
        raise UserError(f"{len(names)} servers run: choose one with --port, --url or --pid{listed(servers, silent)}")
    found = [stats for stats in servers if matches(stats, args)]
    if len(found) == 1 or (found and takes_any_model and len({stats.pid for stats in found}) == 1):
        return found[0].server
    if found and len({stats.pid for stats in found}) == 1:
        raise UserError(f"this server has {len(found)} models: choose one with --model{listed(found)}")
    if found:  # at different addresses of this machine
        raise UserError(f"{len(found)} servers have port {args.port}: choose one with --url or --pid{listed(found)}")
    if _model(args) is not None:
        raise UserError(f"no server has the model {args.model!r}; running are:{listed(servers, silent)}")
    raise UserError(no_server(args.url or f"http://127.0.0.1:{args.port}") + "; running are:" + listed(servers, silent))


def look(names: Sequence[str]) -> tuple[list[ServerStats], list[str]]:
    """The stats of these servers, and the problems of those that do not answer. All are asked at once: each may take
    seconds to find that one of its stages hangs."""
    if not names:
        return [], []
    with ThreadPoolExecutor(min(len(names), MAX_ASKED)) as threads:
        answers = list(threads.map(_stats_of, names))
    return [one for one in answers if not isinstance(one, str)], [one for one in answers if isinstance(one, str)]


def _stats_of(name: str) -> ServerStats | str:
    """Of a server, or the problem."""
    try:
        with Admin(name) as server:
            return server.stats()
    except UserError as error:
        return str(error)


def is_selected(args: argparse.Namespace) -> bool:
    return args.port is not None or args.url is not None or args.pid is not None or _model(args) is not None


def _model(args: argparse.Namespace) -> str | None:
    found: str | None = getattr(args, "model", None)
    return found


def matches(stats: ServerStats, args: argparse.Namespace) -> bool:
    """Whether a server is at the port or the address of the options, or has their pid, and the model that they name."""
    if _model(args) not in (None, stats.model):
        return False
    if args.pid is not None:
        return bool(stats.pid == args.pid)
    host, port = host_and_port(stats.address)
    if args.port is not None:
        return bool(port == args.port)
    if args.url:
        given, given_port = host_and_port(args.url)
        is_same = host == given or host in ANY_HOST or (host in LOOPBACK and given in LOOPBACK)
        return port == given_port and is_same
    return True


def pid_of(server: str) -> int:
    """The supervisor's pid in a server's name."""
    return int(server.partition("-")[0])


def owner_of(port: int) -> str:
    """Which server of this user has a port, as the rest of a sentence; empty if none has."""
    found = [one for one in look(find_servers())[0] if one.address and host_and_port(one.address)[1] == port]
    return "".join(f"; `pipeline stop --port {port}` ends your server there, pid {one.pid}" for one in found[:1])


def listed(servers: Sequence[ServerStats], silent: Sequence[str] = ()) -> str:
    """The servers as lines below a message: pid, address and model."""
    width = max((len(stats.address) for stats in servers), default=0)
    lines = [f"  pid {one.pid:<8} {one.address or '(starting)':<{width}}  {one.model or '…'}" for one in servers]
    return "".join(f"\n{line}" for line in [*lines, *(f"  {problem}" for problem in silent)])
