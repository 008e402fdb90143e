"""What the gateway of several models tells the supervisor arrives, however much clients say meanwhile."""

import asyncio
import socket

from pipeline.runtime.messages.models import FromSharedGateway, KeepModel, LoadModel, ModelActivity
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.stages.gateway.models.packet_sender import PacketSender


def received(supervisor: socket.socket) -> list[FromSharedGateway]:
    decoder: MessageDecoder[FromSharedGateway] = MessageDecoder(FromSharedGateway)
    found: list[FromSharedGateway] = []
    while True:
        try:
            found.append(decoder.decode(supervisor.recv(1 << 16)))
        except BlockingIOError:
            return found


async def test_a_flood_of_one_client_loses_nothing_that_others_wait_for() -> None:
    supervisor, gateway = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, gateway:
        supervisor.setblocking(False)
        gateway.setblocking(False)
        sender = PacketSender(gateway)
        for number in range(5000):  # the supervisor has other work
            sender.send(KeepModel("a", float(number)))
        sender.send(LoadModel("b"))
        sender.send(ModelActivity("a", True))
        sender.send(ModelActivity("a", False))
        found = received(supervisor)
        assert 10 < len(found) < 5000
        while len(more := received(supervisor)) == 0:
            await asyncio.sleep(0)
        assert more == [KeepModel("a", 4999.0), LoadModel("b"), ModelActivity("a", False)]
        sender.send(LoadModel("c"))
        assert received(supervisor) == [LoadModel("c")], "at once again"


async def test_a_supervisor_that_is_gone_is_no_error() -> None:
    supervisor, gateway = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with gateway:
        supervisor.close()
        sender = PacketSender(gateway)
        sender.send(LoadModel("a"))
        sender.close()
