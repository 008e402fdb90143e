"""Sends the supervisor what clients want of its models."""

import asyncio
import socket

import msgspec

from pipeline.runtime.messages.models import FromSharedGateway


class PacketSender:
    """Never waits. What the supervisor has no room for is sent later: of each kind of message only the last one about
    each model, so clients can't make it grow."""

    def __init__(self, to_supervisor: socket.socket) -> None:
        """`to_supervisor` does not block. Belongs to the running loop once it has something to send later."""
        self._socket = to_supervisor
        self._encoder = msgspec.msgpack.Encoder()
        self._later: dict[tuple[type[FromSharedGateway], str], FromSharedGateway] = {}

    def send(self, message: FromSharedGateway) -> None:
        if not self._later and self._try(message):
            return
        if not self._later:
            asyncio.get_running_loop().add_writer(self._socket.fileno(), self._go_on)
        key = type(message), message.name
        self._later.pop(key, None)
        self._later[key] = message

    def _try(self, message: FromSharedGateway) -> bool:
        """Returns False if there is no room."""
        try:
            self._socket.send(self._encoder.encode(message))
        except BlockingIOError:
            return False
        except OSError:  # the supervisor is gone
            return True
        return True

    def _go_on(self) -> None:
        for key, message in list(self._later.items()):
            if not self._try(message):
                return
            del self._later[key]
        self.close()

    def close(self) -> None:
        """Forget what was not sent."""
        self._later.clear()
        asyncio.get_running_loop().remove_writer(self._socket.fileno())
