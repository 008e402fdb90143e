"""`serve_models`: as `serve`, for several models."""

import socket
import time

from pipeline.client.connection.zmq_address import check_free
from pipeline.config.models import ServerSettings
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.models.manager import ModelManager
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.serve import raise_descriptor_limit
from pipeline.supervisor.shared import bind_policy
from pipeline.supervisor.shared.listeners import listen, zmq_address
from pipeline.supervisor.shared.shared_keys import SharedKeys


def serve_models(server: ServerSettings, run_mode: RunMode) -> int:
    """Run a server of several models until a signal stops it. Returns the process's exit code. Raises as `serve`."""
    settings = server.shared
    gateway = settings.gateway
    log = open_log(SUPERVISOR, settings.log_level, settings.log_format)
    begun = time.monotonic()
    raise_descriptor_limit()
    keys = SharedKeys(bind_policy.keys_of(settings, log))
    if gateway.ssl_certfile:  # imported only then, because it takes a while
        from pipeline.runtime.security.tls import server_context

        server_context(gateway)
    listeners = listen(gateway.host, gateway.port)
    fork_server = ForkServer(log)
    admins: list[socket.socket] = []
    try:
        if gateway.admin_port >= 0:
            admins = listen(gateway.admin_host, gateway.admin_port, 1, "gateway.admin_")
        if (address := zmq_address(settings, listeners)) is not None:
            check_free(address)
        manager = ModelManager(server, listeners, admins, keys, run_mode, log, fork_server)
        try:
            return manager.run(begun)
        finally:
            manager.close()
    finally:
        fork_server.close()
        for listener in (*listeners, *admins):
            listener.close()
        keys.close()
