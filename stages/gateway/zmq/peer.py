"""A client of the ZeroMQ server: what is known of it, and what waits for it."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from pipeline.runtime.security.api_keys import NO_SCOPE
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.zmq.connection import Connection
from pipeline.stages.gateway.zmq.serving.model import ZmqModel
from pipeline.stages.gateway.zmq.stream import ZmqStream

RETRY_S = 0.02
"""First delay before a full connection is tried again. It doubles each time the connection is still full."""


class ClientPeer:
    """A client."""

    def __init__(self, connection: Connection, now_s: float) -> None:
        self.connection = connection
        self.heard_s = now_s
        self.is_welcome = False
        self.scope = NO_SCOPE
        """Of its API key."""
        self.model: ZmqModel
        """Since its hello."""
        self.waiting: dict[int, asyncio.Task[None]] = {}
        """Requests that wait until the model is loaded."""
        self.asking: set[asyncio.Task[None]] = set()
        """Its questions to the supervisor, which nothing waits for at the end."""
        self.streams: dict[int, tuple[ZmqStream, asyncio.Task[None]]] = {}
        self.pending: deque[bytes] = deque()
        """Small messages that the full connection did not take. Those with output or ids wait in their streams."""
        self.pending_bytes = 0
        self.num_given = 0
        """Bytes of all messages that its connection was given."""
        self.full_s: float | None = None
        """When the connection became full."""
        self.parsing: asyncio.Task[None] | None = None
        """Its large message."""
        self.failure: ApiError | None = None
        """Why the request of that message is not opened any more."""
        self.retry: asyncio.TimerHandle | None = None
        self.retry_s = RETRY_S

    def ask(self, question: Coroutine[Any, Any, None]) -> None:
        """Answer a question of the client."""
        task = asyncio.get_running_loop().create_task(question)
        self.asking.add(task)
        task.add_done_callback(self.asking.discard)

    def sent(self) -> None:
        """The connection has taken a message."""
        self.retry_s = RETRY_S

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long, and perhaps the client neither: nothing is late for that."""
        connection = self.connection
        self.heard_s += seconds
        connection.opened_s += seconds
        if self.full_s is not None:
            self.full_s += seconds
        if connection.begun_s is not None:
            connection.begun_s += seconds
