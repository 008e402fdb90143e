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
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared import bind_policy
from pipeline.supervisor.shared.listeners import listen, zmq_address
from pipeline.supervisor.shared.shared_keys import SharedKeys
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


@contextlib.contextmanager
def open_server(
    settings: Settings, keys: Keys | None = None, book: KeyBook | None = None, *, is_inline: bool = False
) -> Iterator[OpenServer]:
    """Open the log and the listening sockets, and read the API keys, if none are given: into `book`, to read them again
    later. Raises as `serve`."""
    gateway = settings.gateway
    log = open_log(SUPERVISOR, settings.log_level, settings.log_format)
    raise_descriptor_limit()
    keys = bind_policy.keys_of(settings, log, keys, book)
    if gateway.ssl_certfile:  # imported only then, because it takes a while
        from pipeline.runtime.security.tls import server_context

        server_context(gateway)
    listeners = listen(gateway.host, gateway.port, gateway.replicas)
    admins: list[socket.socket] = []
    fork_server: ForkServer | None = None
    try:
        if not is_inline:
            fork_server = ForkServer(log)  # imports while the supervisor creates what is shared
        if gateway.admin_port >= 0:
            admins = listen(gateway.admin_host, gateway.admin_port, gateway.replicas, "gateway.admin_")
        for replica in range(gateway.replicas):
            if (address := zmq_address(settings, listeners, replica)) is not None:
                check_free(address)
        yield OpenServer(log, keys, listeners, admins, fork_server)
    finally:
        if fork_server is not None:
            fork_server.close()
        for listener in (*listeners, *admins):
            listener.close()


def serve(settings: Settings, run_mode: RunMode | None = None, keys: Keys | None = None) -> int:
    """Run a server until a signal stops it. Returns the process's exit code. `keys` replace those of the settings and
    the environment.

    Raises OSError, in words for the user, if the address is not available, and ConfigError if API keys or
    certificates can't be read or the server would be reachable from other machines without keys.
    """
    begun = time.monotonic()
    book = KeyBook() if keys is None else None
    is_inline = run_mode is not None and run_mode.inline
    with open_server(settings, keys, book, is_inline=is_inline) as server:
        try:
            supervisor = Supervisor(
                settings, server.listeners, server.log, run_mode, server.keys, server.admins, book, server.fork_server
            )
        except UserError as error:  # of the sockets for other hosts
            raise OSError(str(error)) from error
        try:
            code = supervisor.run(begun)
            supervisor.raise_inline()
            return code
        finally:
            supervisor.close()


def serve_models(models: ServerSettings, run_mode: RunMode) -> int:
    """As `serve`, for several models."""
    from pipeline.supervisor.models.manager import ModelManager

    begun = time.monotonic()
    with open_server(models.shared) as server, contextlib.closing(SharedKeys(server.keys)) as keys:
        manager = ModelManager(models, server.listeners, server.admins, keys, run_mode, server.log, server.fork_server)
        with contextlib.closing(manager):
            return manager.run(begun)
