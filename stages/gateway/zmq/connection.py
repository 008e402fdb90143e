"""One connection of a ZeroMQ client: its bytes, and what is known of it. The listener decides what happens to it."""

import asyncio
from typing import Protocol, cast

from pipeline.runtime.security.client_address import client_address
from pipeline.stages.gateway.zmq import zmtp


class ConnectionOwner(Protocol):
    """The listener."""

    scratch: memoryview

    def opened(self, connection: "Connection") -> None: ...

    def read(self, connection: "Connection") -> None: ...

    def lost(self, connection: "Connection") -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, owner: ConnectionOwner, max_first_bytes: int) -> None:
        self.opened_s = 0.0
        self.is_ending = False
        """Further input is ignored."""
        self.begun_s: float | None = None
        """When the first part of an incomplete message arrived, later by the time that reading was paused since; None
        if there is none."""
        self.decoder = zmtp.Decoder(max_first_bytes)
        self.is_waiting = False
        """Reading is paused until it gets budget, or its next turn."""
        self.paused_s = 0.0
        """Since when."""
        self.is_held = False
        """Its last message is still being parsed: nothing more of it is handled."""
        self.is_welcome = False
        self.owner = ""
        """The scope of its API key, or its address before hello and on a server without keys."""
        self.address = ""
        """Of its client; empty at ipc://"""
        self.heard_s = 0.0
        """When its last message arrived."""
        self.transport: asyncio.Transport | None = None
        self._owner = owner

    @property
    def num_arrived(self) -> int:
        """Bytes of its incomplete message."""
        return self.decoder.num_arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.address = client_address(transport)
        self._owner.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        missing = self.decoder.missing
        return self._owner.scratch if missing is None else missing

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_ending:
            return
        if self.decoder.missing is None:
            self.decoder.feed(self._owner.scratch[:nbytes])
        else:
            self.decoder.fill(nbytes)
        self._owner.read(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)
        self.transport = None
