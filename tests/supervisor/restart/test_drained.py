"""A drained gateway accepts no more connections, and none waits in the kernel's backlog."""

import logging
import socket

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.transport.outbox import Outbox
from pipeline.supervisor.shared.listeners import listen
from pipeline.supervisor.supervisor import Supervisor
from tests.stages.gateway.peers import until


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_connections_are_refused_once_every_gateway_has_drained() -> None:
    """Gateways close their own sockets; the supervisor still holds copies of them."""
    listeners = listen("127.0.0.1", 0, 2)
    address = listeners[0].getsockname()
    supervisor = Supervisor(Settings(gateway=GatewaySettings(port=0, replicas=2)), listeners, logging.getLogger("test"))
    supervisor._loop.state.is_ending = True
    outboxes: list[Outbox[m.SupervisorInbox]] = [
        Outbox(supervisor._loop._context, supervisor._resources.addresses["supervisor.0"], m.Envelope(name, 1), 1)
        for name in ("gateway.0", "gateway.1")
    ]
    try:
        for number, outbox in enumerate(outboxes):
            assert not is_refused(address)
            outbox.send(m.Drained())
            until(lambda: (supervisor._loop.drain_inbox(), listeners[number].fileno() < 0)[1], "it closes the socket")  # noqa: B023
        assert is_refused(address)
    finally:
        for outbox in outboxes:
            outbox.close()
        supervisor.close()
        for listener in listeners:
            listener.close()
