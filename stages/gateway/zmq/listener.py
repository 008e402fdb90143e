"""The ZMTP listener: the server's side of ZeroMQ connections, with bounded memory.

    accepted ──greeting, READY──► messages, one frame each ──► ended
        └──────── no hello in time, or not ZMTP ──────────────►┘

Bytes are decoded and handled in the turn of the loop that reads them, so nothing queues here. A connection holds the
bytes of two reads and at most one frame. Frames above `SMALL_BYTES` share a budget (frame_budget.py); a connection that
finds it used up is not read until some is free. Everything else waits in the kernel and in the client.

Turns, room and connections are shared fairly among API keys, or among addresses on a server without keys.
"""

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pipeline.runtime.queues.fair_queue import FairQueue
from pipeline.runtime.security.client_address import client_address
from pipeline.runtime.security.peer_credentials import uid_of_peer
from pipeline.stages.gateway.zmq import zmtp
from pipeline.stages.gateway.zmq.bind import LISTEN_BACKLOG, listen
from pipeline.stages.gateway.zmq.connection import Connection
from pipeline.stages.gateway.zmq.frame_budget import FrameBudget

MAX_CONNECTIONS = 1024
"""Lower if the limit of open files is low."""
RECEIVE_BOUND = 16
"""Messages of one connection handled in a row, before other connections."""
MAX_TURN_MESSAGES = 64
"""Messages of all connections handled in one turn of the loop, so that other tasks run."""
MAX_TURN_S = 0.01
"""No message is begun after this time of a turn. Large messages take up to 50 ms each."""
SMALL_BYTES = zmtp.FIRST_BYTES
"""Messages up to this size, and this much of larger ones, need no budget."""
NUM_LARGE = 8
"""The budget, in messages of the largest size."""
UNWELCOME_SHARE = 4
"""If all places are taken, connections without hello keep at most this fraction of them."""
ROOM_PARTS = 64
"""This fraction of the connections makes room at once, so that a flood does not make the listener look for one each
time."""
ENDING_SHARE = 4
"""Connections above the limit, while others end, are at most this fraction of it."""
SEND_BOUND_BYTES = 256 * 1024
"""A connection with more buffered output than this is full; further output stays in its requests, merged."""
GRACE_S = 0.1
"""Time to send buffered output before a connection is closed."""

Sent = Literal["sent", "full", "gone"]


class ZmtpListener:
    """Owns the listening socket and its connections. It calls `on_open` with each connection, `on_message` with each
    message, `on_refusal` if a message is not read, which is the last of its connection, `on_slow` if others need the
    room of its message, and `on_end` with each connection that has ended. If all places are taken, it asks `is_busy`
    whether a connection has open requests, and calls `on_crowded` with one that must make room. `on_slow` and
    `on_crowded` must end the connection."""

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        max_first_bytes: int,
        *,
        on_open: Callable[[Connection], None],
        on_message: Callable[[Connection, bytes | bytearray], None],
        on_refusal: Callable[[Connection, zmtp.UnreadableMessage], None],
        on_slow: Callable[[Connection], None],
        is_busy: Callable[[Connection], bool],
        on_crowded: Callable[[Connection], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """Bind; `start` accepts. `max_first_bytes` bounds a connection's messages until `welcome`. Raises UserError if
        it can't listen on the address."""
        self._on_open, self._on_message, self._on_refusal, self._on_end = on_open, on_message, on_refusal, on_end
        self._on_slow, self._is_busy, self._on_crowded = on_slow, is_busy, on_crowded
        self._max_message_bytes = max_message_bytes
        self._max_first_bytes = max_first_bytes
        self._loop = asyncio.get_running_loop()
        self.scratch = memoryview(bytearray(zmtp.READ_BYTES))
        """Read buffer of all connections: each read is consumed before the next one."""
        self._budget: FrameBudget[Connection] = FrameBudget(NUM_LARGE * max_message_bytes)
        self._turn_queue: FairQueue[Connection, None] = FairQueue()
        self._num_left = MAX_TURN_MESSAGES
        self._turn_s = 0.0
        """When the turn of the loop began, by time.monotonic(); 0 if no message has been handled in it."""
        self._is_turn_due = False
        self._connections: dict[Connection, None] = {}
        self._is_closed = False
        self._all_lost = asyncio.Event()
        self._max_connections = max_connections()
        self._is_ipc = address.startswith("ipc://")
        self._path = address.removeprefix("ipc://") if self._is_ipc else ""
        self._sockets = listen(address)
        self._servers: list[asyncio.Server] = []
        self._uses_old_name = False

    async def start(self) -> None:
        """Accept connections."""
        create = self._loop.create_unix_server if self._is_ipc else self._loop.create_server
        for accept, listener in zip((self._accept, self._accept_by_old_name), self._sockets, strict=False):
            self._servers.append(await create(accept, sock=listener, backlog=LISTEN_BACKLOG))

    def _accept(self) -> Connection:
        return Connection(self, self._max_first_bytes)

    def _accept_by_old_name(self) -> Connection:
        if not self._uses_old_name:
            self._uses_old_name = True
            logging.getLogger("pipeline").warning(
                "a client connected to …/door, the old name of …/zmq, which the next release does not have"
            )
        return self._accept()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def connections(self) -> list[Connection]:
        return list(self._connections)

    # ------------------------------------------------------------------------------------------------------ receive

    def opened(self, connection: Connection) -> None:
        assert connection.transport is not None
        fd = connection.transport.get_extra_info("socket").fileno()
        is_foreign = self._is_ipc and uid_of_peer(fd) != os.geteuid()
        connection.owner = client_address(connection.transport)
        if is_foreign or self._is_closed or not self._has_capacity(connection.owner):
            connection.is_ending = True
            connection.transport.abort()
            return
        connection.opened_s = connection.heard_s = self._loop.time()
        self._connections[connection] = None
        connection.transport.write(zmtp.GREETING)
        self._on_open(connection)

    def _has_capacity(self, owner: str) -> bool:
        """Whether there is a place for one more connection; makes room if all are taken."""
        num, most = len(self._connections), self._max_connections
        if num < most:
            return True
        if num > most + most // ENDING_SHARE:
            return False
        staying = [one for one in self._connections if not one.is_ending]
        if len(staying) >= most:  # else the others end within GRACE_S
            for victim in (victims := self._victims(staying, owner)):
                self._on_crowded(victim)
            return bool(victims)
        return True

    def _victims(self, staying: list[Connection], owner: str) -> list[Connection]:
        """A few connections that make room for one of `owner`: those without hello, the oldest first, if they are many;
        otherwise those without open requests, the most silent first, of an owner with more than its share."""
        num = max(1, self._max_connections // ROOM_PARTS)
        unwelcome = [one for one in staying if not one.is_welcome]
        if len(unwelcome) > self._max_connections // UNWELCOME_SHARE:
            return unwelcome[:num]
        num_of_owner = Counter(one.owner for one in staying)
        share = self._max_connections // len({*num_of_owner, owner})
        largest = max(num_of_owner, key=num_of_owner.__getitem__)
        idle = [one for one in staying if one.owner == largest and one.is_welcome and not self._is_busy(one)]
        idle.sort(key=lambda one: one.heard_s)
        return idle[: min(num, num_of_owner[largest] - share)] or unwelcome[:1]

    def welcome(self, connection: Connection, scope: str) -> None:
        """Accept messages up to the full size, for this scope."""
        connection.is_welcome = True
        connection.owner = scope or connection.owner
        connection.decoder.max_frame_bytes = self._max_message_bytes

    def read(self, connection: Connection) -> None:
        """Handle the messages of a connection that have arrived, up to RECEIVE_BOUND."""
        self._schedule_turn()
        for _ in range(RECEIVE_BOUND):
            if connection.is_ending or connection.transport is None:
                return
            if connection.is_held:
                if connection.decoder.is_inside:  # else the client may leave
                    self._pause(connection)
                return
            if self._is_turn_over:
                break
            try:
                event = connection.decoder.next()
            except zmtp.ProtocolError:
                self._shut(connection)
                return
            if event is None:
                self._resume(connection)
                return
            self._num_left -= 1
            if isinstance(event, zmtp.LargeFrame):
                if not self._admit(connection, event.num_bytes):
                    return
                continue
            self._handle(connection, event)
            if not connection.is_held:
                self._free_budget(connection)
        self._pause(connection)
        self._wait_for_turn(connection)

    def hold(self, connection: Connection) -> None:
        """Handle no more of a connection whose message is being parsed. The message keeps its room."""
        connection.is_held = True

    def go_on(self, connection: Connection) -> None:
        """The message has been parsed."""
        connection.is_held = False
        self._free_budget(connection)
        if not connection.is_ending and connection.transport is not None:
            self._wait_for_turn(connection)

    @property
    def _is_turn_over(self) -> bool:
        """Whether other tasks must run before the next message."""
        now_s = time.monotonic()
        self._turn_s = self._turn_s or now_s
        return self._num_left == 0 or now_s - self._turn_s > MAX_TURN_S

    def _wait_for_turn(self, connection: Connection) -> None:
        if connection not in self._turn_queue:
            self._turn_queue.push(connection, None, connection.owner, 1)
        self._schedule_turn()

    def _handle(self, connection: Connection, event: zmtp.ZmtpMessage | zmtp.Command | zmtp.UnreadableMessage) -> None:
        connection.begun_s = None
        connection.heard_s = self._loop.time()
        match event:
            case zmtp.ZmtpMessage(data):
                self._on_message(connection, data)
            case zmtp.UnreadableMessage():
                self._on_refusal(connection, event)
            case zmtp.Command(b"greeting"):
                self._write(connection, zmtp.ready(b"ROUTER"))
            case zmtp.Command(b"PING", data):
                if not self._is_full(connection):  # else the buffered output is a sign of life
                    self._write(connection, zmtp.pong(data))
            case zmtp.Command():
                pass

    def _schedule_turn(self) -> None:
        """Schedule `_turn` in the next turn of the loop."""
        if not self._is_turn_due and not self._is_closed:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        self._num_left, self._turn_s = MAX_TURN_MESSAGES, 0.0
        for _ in range(len(self._turn_queue)):
            if self._is_turn_over or (turn := self._turn_queue.pop()) is None:
                break
            self.read(turn[0])
        if self._turn_queue:
            self._schedule_turn()

    def _pause(self, connection: Connection) -> None:
        """Stop reading for now."""
        if not connection.is_waiting and connection.transport is not None and not connection.transport.is_closing():
            connection.is_waiting = True
            connection.paused_s = self._loop.time()
            connection.transport.pause_reading()

    def _resume(self, connection: Connection) -> None:
        """Everything that has arrived is handled: continue reading."""
        if connection.begun_s is not None and connection.is_waiting:
            connection.begun_s += self._loop.time() - connection.paused_s
        if connection.begun_s is None and connection.decoder.is_inside:
            connection.begun_s = self._loop.time()
        if connection.is_waiting and connection.transport is not None and not connection.transport.is_closing():
            connection.is_waiting = False
            connection.transport.resume_reading()

    # ------------------------------------------------------------------------------------------------------- budget

    def _admit(self, connection: Connection, num_bytes: int) -> bool:
        """Receive up to `num_bytes` of a large frame, or pause until there is room. Returns whether it goes on."""
        if num_bytes > SMALL_BYTES:
            granted = self._budget.take(connection, num_bytes)
            self._go_on(granted, connection)
            if connection not in granted:
                self._pause(connection)
                self.give_up_slow()
                return False
        connection.decoder.admit()
        return True

    def _free_budget(self, connection: Connection) -> None:
        self._go_on(self._budget.release(connection), connection)

    def _go_on(self, granted: list[Connection], current: Connection) -> None:
        """Have those read again that got room, besides the one that is being read."""
        for connection in granted:
            if connection is not current:
                self._wait_for_turn(connection)

    def give_up_slow(self) -> None:
        """If connections wait for room, end those whose messages arrive too slowly, the slowest first. Call it now and
        then."""
        while (slowest := self._budget.slowest(self._loop.time())) is not None:
            self._on_slow(slowest)
            self._free_budget(slowest)

    # --------------------------------------------------------------------------------------------------------- send

    def send(self, connection: Connection, data: bytes) -> Sent:
        """Send one message without blocking. Returns whether it was sent, or the connection is full or gone."""
        if connection.transport is None or connection.transport.is_closing():
            return "gone"
        if self._is_full(connection):
            return "full"
        self._write(connection, zmtp.message(data))
        return "sent"

    def num_unsent(self, connection: Connection) -> int:
        """Bytes that the kernel has not taken."""
        return 0 if connection.transport is None else connection.transport.get_write_buffer_size()

    def _is_full(self, connection: Connection) -> bool:
        return self.num_unsent(connection) > SEND_BOUND_BYTES

    def _write(self, connection: Connection, data: bytes) -> None:
        if connection.transport is not None and not connection.transport.is_closing():
            connection.transport.write(data)

    # ---------------------------------------------------------------------------------------------------------- end

    def end(self, connection: Connection) -> None:
        """Close a connection after GRACE_S, in which buffered output is sent. `on_end` follows."""
        if not connection.is_ending:
            connection.is_ending = True
            self._pause(connection)
            self._free_budget(connection)
            self._loop.call_later(GRACE_S, self._shut, connection)

    def _shut(self, connection: Connection) -> None:
        connection.is_ending = True
        if connection.transport is not None:
            connection.transport.abort()

    def lost(self, connection: Connection) -> None:
        """The connection has been lost."""
        connection.is_ending = True
        self._turn_queue.remove(connection)
        self._free_budget(connection)
        if connection in self._connections:
            del self._connections[connection]
            self._on_end(connection)
        if self._is_closed and not self._connections:
            self._all_lost.set()

    def stop(self) -> None:
        """Accept no more connections, and give the address free. Idempotent."""
        for server in self._servers:
            server.close()
        for listener in self._sockets:
            listener.close()
        self._servers, self._sockets = [], []

    def close(self, linger_s: float = 0.0) -> None:
        """Close all connections; `wait_closed` waits up to `linger_s` for their buffered output."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        if self._path and not self._path.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                Path(self._path).unlink()
        for connection in self.connections:
            connection.is_ending = True
            if connection.transport is not None:
                connection.transport.close()
            self._loop.call_later(linger_s, self._shut, connection)
        if not self._connections:
            self._all_lost.set()

    async def wait_closed(self) -> None:
        """Wait until buffered output is sent or `linger_s` has passed."""
        await self._all_lost.wait()


def max_connections() -> int:
    """The connections that a gateway may have: a quarter of the limit of open files at most."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // 4)
