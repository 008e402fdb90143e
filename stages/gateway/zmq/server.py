"""The ZeroMQ door: clients that speak pipeline.client.protocol, beside those that speak HTTP. Both open their requests
in the same table, by the same rules.

    client ──Hello, Generate, Abort, Credit, Ping──► Door ──► Requests.open ──► the stages
    client ◄──Accepted, Delta, Finished, Failed──── DoorStream ◄──wake── Requests

Everything that a client can make us keep is bounded: messages (their size, and how many are on their way), connections
(a hello in time, then a sign of life), requests (credits of the gateway's own), and what is to be sent (deltas merge,
letters have a bound). Whoever does not keep to the protocol is told so once and loses the connection, and nobody else
notices.
"""

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import assert_never

import msgspec

from pipeline.client import protocol as p
from pipeline.runtime.api_keys import NO_SCOPE, Keys
from pipeline.runtime.channels import MessageDecoder
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.app import Doors
from pipeline.stages.gateway.http.guard import unauthorized
from pipeline.stages.gateway.parsing import parse
from pipeline.stages.gateway.requests import Requests
from pipeline.stages.gateway.zmq import errors, zmtp
from pipeline.stages.gateway.zmq.router import Connection, DoorSocket
from pipeline.stages.gateway.zmq.stream import STALL_S, DoorStream
from pipeline.version import VERSION

HELLO_S = 5.0
"""How long a new connection has to say hello."""
MAX_HELLO_BYTES = 16384
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""Longest that a client may say nothing."""
MESSAGE_S = 60.0
"""Longest that a message may take to come whole, as a body over HTTP."""
SWEEP_S = 0.5
"""How often is looked for those who said nothing."""
RETRY_S = 0.02
"""How soon a connection that took nothing is tried again. Each time that it takes nothing still this doubles."""
MAX_RETRY_S = 0.3
MAX_LETTERS = 2048
"""Messages other than deltas that wait for a client that takes none."""
LINGER_S = 0.5
"""What last words have to leave in, when the stage stops."""


class Peer:
    """A client."""

    def __init__(self, connection: Connection, now_s: float) -> None:
        self.connection = connection
        self.heard_s = now_s
        self.is_welcome = False
        self.scope = NO_SCOPE
        """Of the API key that it has shown."""
        self.streams: dict[int, tuple[DoorStream, asyncio.Task[None]]] = {}
        self.letters: deque[bytes] = deque()
        """What the connection did not take, but deltas, which their streams keep."""
        self.full_s: float | None = None
        """Since when it takes nothing."""
        self.retry: asyncio.TimerHandle | None = None
        self.retry_s = RETRY_S

    def sent(self) -> None:
        """It has taken something."""
        self.retry_s = RETRY_S


class _Way:
    """How a stream reaches its client."""

    def __init__(self, door: "Door", peer: Peer) -> None:
        self._door = door
        self._peer = peer

    @property
    def takes_deltas(self) -> bool:
        return self._peer.full_s is None

    def send_delta(self, delta: p.Delta) -> bool:
        return self._door.send_delta(self._peer, delta)

    def post(self, letter: p.ServerMessage) -> None:
        self._door.post(self._peer, letter)


class Door:
    """The clients, and what each has open."""

    def __init__(
        self,
        address: str,
        doors: Doors,
        requests: Requests,
        limits: parse.Limits,
        max_message_bytes: int,
        tasks: asyncio.TaskGroup,
        keys: Keys | None = None,
        needs_key: bool = True,
    ) -> None:
        """Listen; with `keys`, for clients that show one of them, unless they don't need to. Raises UserError where the
        address can't be listened on."""
        self._doors = doors
        self._requests = requests
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._tasks = tasks
        self._keys = keys
        self._needs_key = needs_key
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger("pipeline")
        self._decoder: MessageDecoder[p.ClientMessage] = MessageDecoder(p.ClientMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._peers: dict[Connection, Peer] = {}
        self._is_closed = False
        self._socket = DoorSocket(
            address,
            max_message_bytes,
            min(MAX_HELLO_BYTES, max_message_bytes),
            on_open=self._opened,
            on_message=self._receive,
            on_refusal=self._refuse,
            on_end=self._ended,
        )
        self._sweeper: asyncio.TimerHandle | None = None
        """Runs while there are connections."""

    async def start(self) -> None:
        """Let clients in."""
        await self._socket.start()

    # ---------------------------------------------------------------------------------------------- what clients say

    def _opened(self, connection: Connection) -> None:
        self._peers[connection] = Peer(connection, self._loop.time())
        self._sweep_soon()

    def _receive(self, connection: Connection, data: bytes | bytearray) -> None:
        peer = self._peers[connection]
        peer.heard_s = self._loop.time()
        try:
            self._handle(peer, self._decode(data))
        except ApiError as error:
            self._drop(peer, error)

    def _decode(self, data: bytes | bytearray) -> p.ClientMessage:
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise errors.of_malformed(data, error) from error

    def _refuse(self, connection: Connection, refusal: zmtp.Refusal) -> None:
        """A message is not read."""
        peer = self._peers[connection]
        if refusal.reason == "more frames":
            problem = "a message is one frame, and this one has more: use a DEALER socket"
            self._drop(peer, errors.of_peer(problem, "malformed"))
        elif not peer.is_welcome:
            self._drop(peer, errors.of_peer("the first message of a connection must be hello", "no_hello"))
        else:
            self._leave(peer)

    def _handle(self, peer: Peer, message: p.ClientMessage) -> None:
        """Raises ApiError where the client does not keep to the protocol."""
        if not peer.is_welcome and not isinstance(message, p.Hello):
            raise errors.of_peer("the first message of a connection must be hello", "no_hello")
        match message:
            case p.Hello():
                self._welcome(peer, message)
            case p.Generate():
                self._generate(peer, message)
            case p.Credit(request_id, num_deltas):
                if request_id in peer.streams:
                    peer.streams[request_id][0].grant(num_deltas)
            case p.Abort(request_id):
                if request_id in peer.streams:
                    peer.streams[request_id][0].abort()
            case p.Ping(nonce):
                if peer.full_s is None:  # else what waits is a sign of life
                    self.post(peer, p.Pong(nonce))
            case p.Bye():
                self._leave(peer)
            case _:
                assert_never(message)

    def _welcome(self, peer: Peer, hello: p.Hello) -> None:
        if peer.is_welcome:
            raise errors.of_peer("hello was said before on this connection", "malformed")
        if not hello.min_version <= p.PROTOCOL_VERSION <= hello.max_version:
            raise errors.of_peer(
                f"this server speaks version {p.PROTOCOL_VERSION} of the protocol, the client versions "
                f"{hello.min_version} to {hello.max_version}",
                "unsupported_version",
            )
        if self._keys is not None:
            scope = self._keys.scope_of(hello.api_key)
            if scope is None and self._needs_key:
                raise unauthorized(bool(hello.api_key))
            peer.scope = scope or NO_SCOPE
        facts = self._doors.enter()
        peer.is_welcome = True
        self._socket.welcome(peer.connection)
        client = hello.client[: p.MAX_CLIENT_CHARS]
        self._log.debug("a client has come", extra={"fields": {"client": client, "clients": len(self._peers)}})
        self.post(
            peer,
            p.Welcome(
                version=p.PROTOCOL_VERSION,
                server=f"pipeline/{VERSION}",
                model=self._limits.model,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                max_open_requests=self._limits.max_sequences,
                max_message_bytes=self._max_message_bytes,
                max_credits=p.MAX_CREDITS,
                heartbeat_s=HEARTBEAT_S,
                silence_s=SILENCE_S,
            ),
        )

    def _generate(self, peer: Peer, message: p.Generate) -> None:
        request_id = message.request_id
        if request_id in peer.streams:
            raise errors.of_peer(f"request_id {request_id} is open already on this connection", "duplicate_id")
        try:
            self._doors.enter()
            ask = parse.parse_generate(message, self._limits)
            call = self._requests.open(msgspec.structs.replace(ask, scope=peer.scope))
        except ApiError as error:
            self.post(peer, p.Failed(request_id, errors.on_the_wire(error)))
            return
        stream = DoorStream(request_id, message.credits, call, self._requests)
        task = self._tasks.create_task(self._run(peer, stream))
        peer.streams[request_id] = stream, task

    async def _run(self, peer: Peer, stream: DoorStream) -> None:
        try:
            await stream.run(_Way(self, peer))
        finally:
            peer.streams.pop(stream.request_id, None)

    # ------------------------------------------------------------------------------------------- what they are told

    def send_delta(self, peer: Peer, delta: p.Delta) -> bool:
        """Send now, or return False; the peer's streams are woken when it may take something again."""
        if peer.full_s is not None:
            return False
        if self._socket.send(peer.connection, self._encoder.encode(delta)) == "full":
            self._is_full(peer)
            return False
        peer.sent()
        return True  # or it is gone, and its end will be noticed

    def post(self, peer: Peer, message: p.ServerMessage) -> None:
        """Send now or as soon as the client takes it, in order."""
        data = self._encoder.encode(message)
        if peer.full_s is None and self._socket.send(peer.connection, data) != "full":
            peer.sent()
            return
        peer.letters.append(data)
        self._is_full(peer)
        if len(peer.letters) > MAX_LETTERS:
            self._leave(peer)

    def _is_full(self, peer: Peer) -> None:
        if peer.full_s is None:
            peer.full_s = self._loop.time()
        if peer.retry is None:
            peer.retry = self._loop.call_later(peer.retry_s, self._offer_again, peer)
            peer.retry_s = min(2 * peer.retry_s, MAX_RETRY_S)

    def _offer_again(self, peer: Peer) -> None:
        peer.retry = None
        if not self._offer(peer):
            self._is_full(peer)
            return
        for stream, _ in peer.streams.values():
            stream.wake()

    def _offer(self, peer: Peer) -> bool:
        """Send a peer's letters. Returns whether none is left."""
        while peer.letters:
            if self._socket.send(peer.connection, peer.letters[0]) == "full":
                return False
            peer.sent()
            peer.letters.popleft()
        peer.full_s = None
        return True

    # ------------------------------------------------------------------------------------------------- who goes away

    def _drop(self, peer: Peer, error: ApiError) -> None:
        """Tell a client why, and end its connection."""
        if not peer.letters:
            self._socket.send(peer.connection, self._encoder.encode(p.Error(errors.on_the_wire(error))))
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        """End what a client has open, and its connection."""
        self._abandon(peer)
        self._socket.end(peer.connection)

    def _abandon(self, peer: Peer) -> None:
        self._peers.pop(peer.connection, None)
        peer.letters.clear()
        if peer.retry is not None:
            peer.retry.cancel()
        for stream, task in peer.streams.values():
            stream.leave()
            task.cancel()

    def _ended(self, connection: Connection) -> None:
        """A connection is no more."""
        if (peer := self._peers.get(connection)) is not None:
            self._abandon(peer)

    def _sweep_soon(self) -> None:
        if self._sweeper is None and self._socket.num_connections and not self._is_closed:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End connections that have been silent, or have taken nothing, for too long."""
        now_s = self._loop.time()
        assert self._sweeper is not None
        is_late = now_s - self._sweeper.when() > max(SWEEP_S, 1.0)
        self._sweeper = None
        if not is_late:  # else the loop was held up, and has not read yet what clients have said
            for peer in list(self._peers.values()):
                self._look_at(peer, now_s)
        self._sweep_soon()

    def _look_at(self, peer: Peer, now_s: float) -> None:
        connection = peer.connection
        if not peer.is_welcome:
            if now_s - connection.opened_s > HELLO_S:
                self._leave(peer)
        elif peer.full_s is not None and now_s - peer.full_s > STALL_S:
            self._leave(peer)
        elif connection.is_waiting:
            peer.heard_s = now_s  # it has said something that we have not read yet
        elif connection.begun_s is None:
            if now_s - peer.heard_s > SILENCE_S:
                message = f"the client has said nothing for {SILENCE_S:g} s"
                self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
        elif now_s - connection.begun_s > MESSAGE_S:
            message = f"a message took more than {MESSAGE_S:g} s to arrive"
            self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))

    # -------------------------------------------------------------------------------------------------------- the end

    def fail_all(self, error: ApiError) -> None:
        """Close every request with this error, also those whose clients have granted no credit."""
        for peer in self._peers.values():
            for stream, _ in peer.streams.values():
                stream.fail(error)

    def close(self) -> None:
        """End all connections. What was said last has a moment to leave, for which `wait_closed` waits."""
        if not self._is_closed:
            self._is_closed = True
            if self._sweeper is not None:
                self._sweeper.cancel()
            for peer in list(self._peers.values()):
                self._offer(peer)
                self._abandon(peer)
            self._socket.close(LINGER_S)

    async def wait_closed(self) -> None:
        """Wait until what was said last has left or its time is up."""
        await self._socket.wait_closed()
