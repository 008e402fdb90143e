"""`serve`: open the listening sockets, read the API keys, and run the supervisor."""

import contextlib
import resource
import socket
import time

from pipeline.client.connection.zmq_address import check_free
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
from pipeline.supervisor.supervisor import Supervisor


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, for this process and all that it starts: a restart needs a
    dozen descriptors, and the supervisor could not do one without them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # "unlimited" may be more than the kernel's fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(settings: Settings, run_mode: RunMode | None = None, keys: Keys | None = None) -> int:
    """Run a server until a signal stops it. Returns the process's exit code. `keys` replace those of the settings and
    the environment.

    Raises OSError, in words for the user, if the address is not available, and ConfigError if API keys or
    certificates can't be read or the server would be reachable from other machines without keys.
    """
    log = open_log(SUPERVISOR, settings.log_level, settings.log_format)
    begun = time.monotonic()
    raise_descriptor_limit()
    book = KeyBook() if keys is None else None
    keys = bind_policy.keys_of(settings, log, keys, book)
    if settings.gateway.ssl_certfile:  # imported only then, because it takes a while
        from pipeline.runtime.security.tls import server_context

        server_context(settings.gateway)
    listeners = listen(settings.gateway.host, settings.gateway.port, settings.gateway.replicas)
    admins: list[socket.socket] = []
    fork_server: ForkServer | None = None
    try:
        if run_mode is None or not run_mode.inline:
            fork_server = ForkServer(log)  # imports while the supervisor creates what is shared
        if settings.gateway.admin_port >= 0:
            admins = listen(
                settings.gateway.admin_host, settings.gateway.admin_port, settings.gateway.replicas, "gateway.admin_"
            )
        for replica in range(settings.gateway.replicas):
            if (address := zmq_address(settings, listeners, replica)) is not None:
                check_free(address)
        try:
            supervisor = Supervisor(settings, listeners, log, run_mode, keys, admins, book, fork_server)
        except UserError as error:  # of the sockets for other hosts
            raise OSError(str(error)) from error
        try:
            code = supervisor.run(begun)
            supervisor.raise_inline()
            return code
        finally:
            supervisor.close()
    finally:
        if fork_server is not None:
            fork_server.close()
        for listener in (*listeners, *admins):
            listener.close()
