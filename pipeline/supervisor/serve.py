"""`serve` and `serve_models`: open the listening sockets, read the API keys, and run the supervisor."""

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.client.connection.zmq_address import check_free
from pipeline.config.models import ServerSettings
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.security.key_book import KeyBook
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.restart.server_restart import ServerRestart
from pipeline.supervisor.restart.take_over import TakeOver
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared import bind_policy
from pipeline.supervisor.shared.listeners import listen, zmq_address
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.stopping import EXIT_NOT_STARTED
from pipeline.supervisor.supervisor import Supervisor


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, for this process and all that it starts: a restart needs a
    dozen descriptors, and the supervisor could not do one without them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # "unlimited" may be more than the kernel's fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class OpenServer(NamedTuple):
    """What a server has before its supervisor."""

    log: logging.Logger
    keys: Keys | None
    listeners: list[socket.socket]
    """One for each gateway."""
    admins: list[socket.socket]
    """The same of the admin listener; empty if there is none."""
    fork_server: ForkServer | None
    """None if stages are threads."""
    restart: ServerRestart
    """Replaces the server."""


@contextlib.contextmanager
def open_server(
    settings: Settings,
    keys: Keys | None = None,
    book: KeyBook | None = None,
    take_over: TakeOver | None = None,
    *,
    is_inline: bool = False,
    why_fixed: str = "",
) -> Iterator[OpenServer]:
    """Open the log and the listening sockets, or take those of `take_over`, and read the API keys, if none are given:
    into `book`, to read them again later. `why_fixed` is why the server can't be replaced. Raises as `serve`."""
    gateway = settings.gateway
    log = open_log(SUPERVISOR, settings.log_level, settings.log_format)
    raise_descriptor_limit()
    keys = bind_policy.keys_of(settings, log, keys, book)
    if gateway.ssl_certfile:  # imported only then, because it takes a while
        from pipeline.runtime.security.tls import server_context

        server_context(gateway)
    listeners, admins = _open_sockets(settings, take_over)
    restart = ServerRestart(settings, listeners, admins, log, is_successor=take_over is not None, problem=why_fixed)
    fork_server: ForkServer | None = None
    try:
        if not is_inline:
            fork_server = ForkServer(log)  # imports while the supervisor creates what is shared
        for replica in range(gateway.replicas if take_over is None else 0):
            if (address := zmq_address(settings, listeners, replica)) is not None:
                check_free(address)
        yield OpenServer(log, keys, listeners, admins, fork_server, restart)
    finally:
        if fork_server is not None:
            fork_server.close()
        restart.close()
        for listener in (*listeners, *admins) if not restart.is_due else ():
            listener.close()


def _open_sockets(settings: Settings, take_over: TakeOver | None) -> tuple[list[socket.socket], list[socket.socket]]:
    """The listening sockets of all gateways, and those of the admin listener: the given ones, or new ones. Raises
    OSError, in words for the user."""
    gateway = settings.gateway
    has_admin = gateway.admin_port >= 0
    if take_over is not None:
        return (
            take_over.sockets(take_over.listeners, gateway.replicas, "gateway"),
            take_over.sockets(take_over.admins, gateway.replicas if has_admin else 0, "gateway.admin_port"),
        )
    listeners = listen(gateway.host, gateway.port, gateway.replicas)
    if not has_admin:
        return listeners, []
    try:
        return listeners, listen(gateway.admin_host, gateway.admin_port, gateway.replicas, "gateway.admin_")
    except OSError:
        for one in listeners:
            one.close()
        raise


def serve(
    settings: Settings,
    run_mode: RunMode | None = None,
    keys: Keys | None = None,
    take_over: TakeOver | None = None,
    *,
    is_restartable: bool = False,
) -> int:
    """Run a server until a signal stops it. Returns the process's exit code. `keys` replace those of the settings and
    the environment. `take_over` has the sockets of the server that this one replaces. If it `is_restartable`, this
    process may become another server in the end, or wait for it.

    Raises OSError, in words for the user, if the address is not available, and ConfigError if API keys or
    certificates can't be read or the server would be reachable from other machines without keys.
    """
    begun = time.monotonic()
    book = KeyBook() if keys is None else None
    mode = run_mode or RunMode()
    why_fixed = "" if is_restartable else "this server belongs to a program: end it, and start it again"
    if mode.is_debugged or mode.record:
        why_fixed = f"a server {'whose stages are debugged' if mode.is_debugged else 'that records'} is not replaced"
    with open_server(settings, keys, book, take_over, is_inline=mode.inline, why_fixed=why_fixed) as server:
        restart = server.restart
        try:
            supervisor = Supervisor(
                *(settings, server.listeners, server.log, run_mode, server.keys, server.admins, book),
                server.fork_server,
                restart,
                (lambda: None) if take_over is None else take_over.tell,
            )
        except UserError as error:  # of the sockets for other hosts
            raise OSError(str(error)) from error
        try:
            code = supervisor.run(begun)
            supervisor.raise_inline()
        finally:
            supervisor.close()
        if code == EXIT_NOT_STARTED and take_over is not None and supervisor.problem:
            take_over.tell(supervisor.problem)
    restart.become_next()
    return code


def serve_models(models: ServerSettings, run_mode: RunMode, take_over: TakeOver | None = None) -> int:
    """As `serve`, for several models."""
    from pipeline.supervisor.models.manager import ModelManager

    begun = time.monotonic()
    with (
        open_server(models.shared, take_over=take_over) as server,
        contextlib.closing(SharedKeys(server.keys)) as keys,
    ):
        restart = server.restart
        manager = ModelManager(
            *(models, server.listeners, server.admins, keys, run_mode, server.log, server.fork_server),
            restart,
            take_over,
        )
        with contextlib.closing(manager):
            code = manager.run(begun)
    restart.become_next()
    return code
