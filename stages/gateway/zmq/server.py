"""The ZeroMQ server: clients that use pipeline.client.protocol. They open requests in the same table as HTTP clients,
by the same rules.

    client ──Hello, Generate, Abort, Credit, Ping──► ZmqServer ──► RequestTable.open ──► the stages
    client ◄──Accepted, Delta, Finished, Failed──── ZmqStream ◄──wake── RequestTable

Everything that a client can make the gateway keep is bounded: messages (their size and number), connections (hello in
time, then heartbeats), requests (the gateway's credits), and output (deltas merge, other messages have a bound). A
client that violates the protocol gets one error and loses its connection; other clients are not affected.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import assert_never

import msgspec

from pipeline.client import protocol as p
from pipeline.http_server.access_log import CLIENT_LEFT, AccessLog
from pipeline.http_server.guard import unauthorized
from pipeline.http_server.large_body_lock import LARGE_BYTES
from pipeline.runtime import suspension
from pipeline.runtime.api_keys import NO_SCOPE, Keys
from pipeline.runtime.channels import MessageDecoder
from pipeline.stages.gateway.access_details import details_of
from pipeline.stages.gateway.admin.server_info import recommended
from pipeline.stages.gateway.apis.embeddings.parsing import POOLING
from pipeline.stages.gateway.errors import ApiError, overloaded
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.received import ZMQ, Received, adapter_of
from pipeline.stages.gateway.request_table import RequestTable
from pipeline.stages.gateway.zmq import errors, zmtp
from pipeline.stages.gateway.zmq.frame_budget import MIN_BYTES_PER_S
from pipeline.stages.gateway.zmq.large_messages import Data, LargeMessages
from pipeline.stages.gateway.zmq.listener import Connection, ZmtpListener
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, ReceivedMessage, parse_generate
from pipeline.stages.gateway.zmq.stream import STALL_S, ZmqStream
from pipeline.version import VERSION

HELLO_S = 5.0
"""Time for hello on a new connection."""
MAX_HELLO_BYTES = 16384
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""Longest time between messages of a client."""
MESSAGE_S = 60.0
"""Time for a message to arrive completely, like a body over HTTP."""
SWEEP_S = 0.5
"""Interval of the check for silent clients."""
RETRY_S = 0.02
"""First delay before a full connection is tried again. It doubles each time the connection is still full."""
MAX_RETRY_S = 0.3
MAX_PENDING_MESSAGES = 2048
"""Small messages to a client that wait for it."""
MAX_PENDING_BYTES = 32 * 1024**2
"""Of all messages to all clients that wait for them: an error that names much of a request may be as large as it."""
LINE_S = 1.0
"""Shortest time between log lines about connections that were ended for others."""
LINGER_S = 0.5
"""Time to send buffered output when the stage stops."""


class ClientPeer:
    """A client."""

    def __init__(self, connection: Connection, now_s: float) -> None:
        self.connection = connection
        self.heard_s = now_s
        self.is_welcome = False
        self.scope = NO_SCOPE
        """Of its API key."""
        self.streams: dict[int, tuple[ZmqStream, asyncio.Task[None]]] = {}
        self.pending: deque[bytes] = deque()
        """Small messages that the full connection did not take. Those with output or ids wait in their streams."""
        self.pending_bytes = 0
        self.full_s: float | None = None
        """When the connection became full."""
        self.parsing: asyncio.Task[None] | None = None
        """Its large message."""
        self.failure: ApiError | None = None
        """Why the request of that message is not opened any more."""
        self.retry: asyncio.TimerHandle | None = None
        self.retry_s = RETRY_S

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


class PeerChannel:
    """The ClientChannel of one peer."""

    def __init__(self, server: "ZmqServer", peer: ClientPeer) -> None:
        self._zmq_server = server
        self._peer = peer

    @property
    def is_full(self) -> bool:
        return self._peer.full_s is not None

    def send(self, message: p.ServerMessage) -> bool:
        return self._zmq_server.send(self._peer, message)

    def post(self, message: p.ServerMessage) -> None:
        self._zmq_server.post(self._peer, message)


class ZmqServer:
    """The clients and their open requests."""

    def __init__(
        self,
        address: str,
        readiness: Readiness,
        requests: RequestTable,
        limits: RequestLimits,
        max_message_bytes: int,
        tasks: asyncio.TaskGroup,
        keys: Keys | None = None,
        needs_key: bool = True,
        addresses: Sequence[str] = (),
        gateway: int = 0,
        access_log: AccessLog | None = None,
    ) -> None:
        """Listen. With `keys` and `needs_key`, clients must send one of the keys. `addresses` are those of all the
        server's gateways, and `gateway` is the index of this one. Raises UserError if it can't listen on the
        address."""
        self._readiness = readiness
        self._requests = requests
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._tasks = tasks
        self._keys = keys
        self._needs_key = needs_key
        self.addresses = list(addresses) or [address]
        """Of all gateways. A client learns them when it connects."""
        self._gateway = gateway
        self._access_log = access_log
        self._loop = asyncio.get_running_loop()
        self._log = logging.getLogger("pipeline")
        self._decoder: MessageDecoder[ReceivedMessage] = MessageDecoder(ReceivedMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._peers: dict[Connection, ClientPeer] = {}
        self._is_closed = False
        self._socket = ZmtpListener(
            address,
            max_message_bytes,
            min(MAX_HELLO_BYTES, max_message_bytes),
            on_open=self._opened,
            on_message=self._receive,
            on_refusal=self._refuse,
            on_slow=self._give_up,
            is_busy=lambda connection: bool(self._peers[connection].streams),
            on_crowded=self._make_room,
            on_end=self._ended,
        )
        self._sweeper: asyncio.TimerHandle | None = None
        """Set while there are connections."""
        self._large_messages = LargeMessages(self._decode)
        self._pending_bytes = 0
        """Of all peers."""
        self._num_ended: Counter[str] = Counter()
        """Connections that were ended for others and are not in the log yet, by reason."""
        self._next_line_s = 0.0

    async def start(self) -> None:
        """Accept clients."""
        await self._socket.start()

    # ----------------------------------------------------------------------------------------------------- receive

    def _opened(self, connection: Connection) -> None:
        self._peers[connection] = ClientPeer(connection, self._loop.time())
        self._sweep_soon()

    def _receive(self, connection: Connection, data: bytes | bytearray) -> None:
        peer = self._peers[connection]
        peer.heard_s = self._loop.time()
        if len(data) > LARGE_BYTES and peer.is_welcome:
            self._socket.hold(connection)
            peer.parsing = self._tasks.create_task(self._receive_large(peer, data))
            return
        try:
            self._handle(peer, self._decode(data), data)
        except ApiError as error:
            self._drop(peer, error)

    async def _receive_large(self, peer: ClientPeer, data: bytes | bytearray) -> None:
        """As `_receive`, in a thread."""
        try:
            found = await self._large_messages.read(
                data, peer.scope, lambda: self._limits_of(peer), lambda: self._refusal_of(peer)
            )
            if self._peers.get(peer.connection) is peer:
                match found.message:
                    case ReceivedGenerate() as message if found.is_refused:
                        assert isinstance(found.request, ApiError)
                        self._require_new(peer, message.request_id)
                        self._refused(peer, message, self._loop.time(), found.request)
                    case ReceivedGenerate() as message:
                        self._generate(peer, message, data, lambda: found.request)
                    case message:
                        self._handle(peer, message, data)
        except asyncio.CancelledError:
            if peer.failure is None or self._peers.get(peer.connection) is not peer:
                raise
            with contextlib.suppress(ApiError):
                if isinstance(message := self._decode(data), ReceivedGenerate):
                    self._refused(peer, message, self._loop.time(), peer.failure)
        except ApiError as error:
            self._drop(peer, error)
        except Exception:  # noqa: BLE001 - a fault of ours ends this connection, as in the loop, and not the gateway
            self._log.exception("failed to read a message")
            self._drop(peer, ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error"))
        finally:
            peer.parsing = None
            self._socket.go_on(peer.connection)

    def _limits_of(self, peer: ClientPeer) -> RequestLimits:
        """Those of the client's key, which may use some models only."""
        account = self._requests.accounts.of_scope(peer.scope)
        return self._limits if account is None else self._limits.for_key(account.key.models)

    def _refusal_of(self, peer: ClientPeer) -> ApiError | None:
        """Why no request of the client is admitted now, whatever it asks for."""
        try:
            self._readiness.require_ready()
            if (account := self._requests.accounts.of_scope(peer.scope)) is not None:
                account.check()
        except ApiError as error:
            return error.with_traceback(None)  # else it would keep this frame
        return None

    def _decode(self, data: bytes | bytearray) -> ReceivedMessage:
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise errors.of_malformed(data, error) from error

    def _refuse(self, connection: Connection, refusal: zmtp.UnreadableMessage) -> None:
        """A message has more than one frame, or is too large."""
        peer = self._peers[connection]
        if refusal.reason == "more frames":
            problem = "a message must have one frame, and this one has more: use a DEALER socket"
            self._drop(peer, errors.of_peer(problem, "malformed"))
        elif not peer.is_welcome:
            self._drop(peer, errors.of_peer("the first message of a connection must be hello", "no_hello"))
        else:
            self._disconnect(peer)

    def _handle(self, peer: ClientPeer, message: ReceivedMessage, data: Data) -> None:
        """`data` is the message before decoding. Raises ApiError if the client violates the protocol."""
        if not peer.is_welcome and not isinstance(message, p.Hello):
            raise errors.of_peer("the first message of a connection must be hello", "no_hello")
        match message:
            case p.Hello():
                self._welcome(peer, message)
            case ReceivedGenerate():
                self._generate(peer, message, data, lambda: parse_generate(message, self._limits_of(peer)))
            case p.Credit(request_id, num_deltas):
                if request_id in peer.streams:
                    peer.streams[request_id][0].grant(num_deltas)
            case p.Abort(request_id):
                if request_id in peer.streams:
                    peer.streams[request_id][0].abort()
            case p.Ping(nonce):
                if peer.full_s is None:  # else the buffered output is a sign of life
                    self.post(peer, p.Pong(nonce))
            case p.Bye():
                self._disconnect(peer)
            case _:
                assert_never(message)

    def _welcome(self, peer: ClientPeer, hello: p.Hello) -> None:
        if peer.is_welcome:
            raise errors.of_peer("hello was already sent on this connection", "malformed")
        if not hello.min_version <= p.PROTOCOL_VERSION <= hello.max_version:
            raise errors.of_version(hello)
        if self._keys is not None:
            scope = self._keys.scope_of(hello.api_key)
            if scope is None and self._needs_key:
                raise unauthorized(bool(hello.api_key), "`api_key` in hello")
            peer.scope = scope or NO_SCOPE
        facts = self._readiness.require_ready()
        peer.is_welcome = True
        self._socket.welcome(peer.connection, peer.scope)
        client = hello.client[: p.MAX_CLIENT_CHARS]
        self._log.debug("client connected", extra={"fields": {"client": client, "clients": len(self._peers)}})
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
                defaults=recommended(self._limits.defaults),
                addresses=self.addresses,
                gateway=self._gateway,
                poolings=list(POOLING),
            ),
        )

    def _generate(
        self,
        peer: ClientPeer,
        message: ReceivedGenerate,
        data: Data,
        parse: Callable[[], ParsedRequest | ApiError | None],
    ) -> None:
        """`parse` returns the message's request, or why there is none, or raises that."""
        request_id = message.request_id
        self._require_new(peer, request_id)
        begin_s = self._loop.time()
        account = self._requests.accounts.of_scope(peer.scope)
        try:
            self._readiness.require_ready()
            if account is not None:
                account.arrive()
            parsed = parse()
            assert parsed is not None
            if isinstance(parsed, ApiError):  # not raised: its traceback would keep this frame and the message
                self._refused(peer, message, begin_s, parsed)
                return
            limits = self._limits_of(peer)
            received = Received(
                api=ZMQ, body=bytes(data), scope=peer.scope, models=limits.allowed, adapter=adapter_of(parsed)
            )
            request = self._requests.open(received.complete(parsed, limits), received)
        except ApiError as error:
            self._refused(peer, message, begin_s, error)
            return
        stream = ZmqStream(request_id, message.credits, request, self._requests)
        task = self._tasks.create_task(self._run(peer, stream, begin_s))
        peer.streams[request_id] = stream, task

    def _require_new(self, peer: ClientPeer, request_id: int) -> None:
        """Raises ApiError if the id is in use."""
        if request_id in peer.streams:
            raise errors.of_peer(f"request_id {request_id} is already open on this connection", "duplicate_id")

    def _refused(self, peer: ClientPeer, message: ReceivedGenerate, begin_s: float, error: ApiError) -> None:
        if (account := self._requests.accounts.of_scope(peer.scope)) is not None:
            account.refused(error.status)
        self.post(peer, p.Failed(message.request_id, errors.on_the_wire(error)))
        self._log_access(peer, begin_s, message.name or "", error)

    async def _run(self, peer: ClientPeer, stream: ZmqStream, begin_s: float) -> None:
        try:
            await stream.run(PeerChannel(self, peer))
        finally:
            peer.streams.pop(stream.request_id, None)
            self._log_access(peer, begin_s, stream.request.id, stream.error, stream)

    def _log_access(
        self,
        peer: ClientPeer,
        begin_s: float,
        request_id: str,
        error: ApiError | None,
        stream: ZmqStream | None = None,
    ) -> None:
        """A request is over, or was refused."""
        if self._access_log is None:
            return
        fields = {} if stream is None else details_of(stream.request)
        status = int(HTTPStatus.OK if stream is None or stream.has_ended else CLIENT_LEFT)
        if error is not None:
            status, fields["error"] = error.status, error.code or error.message
        self._access_log.add(
            peer.scope,
            client=peer.connection.address,
            method="ZMQ",
            path="generate",
            status=status,
            request_id=request_id,
            total_s=self._loop.time() - begin_s,
            **fields,
        )

    # -------------------------------------------------------------------------------------------------------- send

    def send(self, peer: ClientPeer, message: p.ServerMessage) -> bool:
        """Send now, or return False; the peer's streams are woken when it may take more."""
        if peer.full_s is not None:
            return False
        if self._socket.send(peer.connection, self._encoder.encode(message)) == "full":
            self._is_full(peer)
            return False
        peer.sent()
        return True  # or it is gone, and `_ended` follows

    def post(self, peer: ClientPeer, message: p.ServerMessage) -> None:
        """Send now or as soon as the connection takes it, in order."""
        data = self._encoder.encode(message)
        if peer.full_s is None and self._socket.send(peer.connection, data) != "full":
            peer.sent()
            return
        peer.pending.append(data)
        self._count_pending(peer, len(data))
        self._is_full(peer)
        if len(peer.pending) > MAX_PENDING_MESSAGES:
            self._disconnect(peer)
        elif self._pending_bytes > MAX_PENDING_BYTES:
            self._loop.call_soon(self._free_pending)  # the caller may be in a loop over the peers

    def _count_pending(self, peer: ClientPeer, num_bytes: int) -> None:
        peer.pending_bytes += num_bytes
        self._pending_bytes += num_bytes

    def _free_pending(self) -> None:
        """End connections that don't take their messages, those of the key for which most are kept."""
        while self._pending_bytes > MAX_PENDING_BYTES:
            kept: Counter[str] = Counter()
            for peer in self._peers.values():
                kept[peer.scope] += peer.pending_bytes
            ((scope, _),) = kept.most_common(1)
            of_scope = (peer for peer in self._peers.values() if peer.scope == scope)
            self._disconnect(max(of_scope, key=lambda peer: peer.pending_bytes))
            self._log_ended("they did not take their messages")

    def _is_full(self, peer: ClientPeer) -> None:
        if peer.full_s is None:
            peer.full_s = self._loop.time()
        if peer.retry is None:
            peer.retry = self._loop.call_later(peer.retry_s, self._retry, peer)
            peer.retry_s = min(2 * peer.retry_s, MAX_RETRY_S)

    def _retry(self, peer: ClientPeer) -> None:
        peer.retry = None
        if not self._send_pending(peer):
            self._is_full(peer)
            return
        for stream, _ in peer.streams.values():
            stream.wake()

    def _send_pending(self, peer: ClientPeer) -> bool:
        """Send a peer's pending messages. Returns whether all were sent."""
        while peer.pending:
            if self._socket.send(peer.connection, peer.pending[0]) == "full":
                return False
            peer.sent()
            self._count_pending(peer, -len(peer.pending.popleft()))
        peer.full_s = None
        return True

    # -------------------------------------------------------------------------------------------------- disconnect

    def _drop(self, peer: ClientPeer, error: ApiError) -> None:
        """Send an error and end the connection."""
        if not peer.pending:
            self._socket.send(peer.connection, self._encoder.encode(p.Error(errors.on_the_wire(error))))
        self._disconnect(peer)

    def _disconnect(self, peer: ClientPeer) -> None:
        """Abort a client's requests and end its connection."""
        self._release(peer)
        self._socket.end(peer.connection)

    def _give_up(self, connection: Connection) -> None:
        """Its message arrives too slowly, and others need the room."""
        message = (
            f"a message arrived slower than {MIN_BYTES_PER_S} bytes per second while other clients needed its room"
        )
        self._drop(self._peers[connection], ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
        self._log_ended("their messages arrived too slowly")

    def _make_room(self, connection: Connection) -> None:
        """All places for connections are taken, and this one has no open request."""
        peer = self._peers[connection]
        if peer.is_welcome:
            self._drop(peer, overloaded("another client needed this connection's place"))
        else:
            self._disconnect(peer)
        self._log_ended("others needed their places")

    def _log_ended(self, why: str) -> None:
        """Log connections that were ended for others, at most a line per second."""
        self._num_ended[why] += 1
        if (now_s := self._loop.time()) >= self._next_line_s:
            self._next_line_s = now_s + LINE_S
            for reason, num in self._num_ended.items():
                self._log.warning("ended connections of clients", extra={"fields": {"num": num, "why": reason}})
            self._num_ended.clear()

    def drop_unknown_keys(self) -> None:
        """The server's keys have changed: end connections whose key is none any more."""
        assert self._keys is not None
        for peer in list(self._peers.values()):
            if peer.scope != NO_SCOPE and self._keys.of_scope(peer.scope) is None:
                self._drop(peer, unauthorized(True, "`api_key` in hello"))

    def _release(self, peer: ClientPeer) -> None:
        self._peers.pop(peer.connection, None)
        peer.pending.clear()
        self._count_pending(peer, -peer.pending_bytes)
        if peer.retry is not None:
            peer.retry.cancel()
        if peer.parsing is not None:
            peer.parsing.cancel()
        for stream, task in peer.streams.values():
            stream.release()
            task.cancel()

    def _ended(self, connection: Connection) -> None:
        """A connection has ended."""
        if (peer := self._peers.get(connection)) is not None:
            self._release(peer)

    def _sweep_soon(self) -> None:
        if self._sweeper is None and self._socket.num_connections and not self._is_closed:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End connections that have been silent, or full, for too long."""
        now_s = self._loop.time()
        assert self._sweeper is not None
        late_s, was_suspended = now_s - self._sweeper.when(), suspension.missed(self._sweeper.when())
        self._sweeper = None
        for peer in list(self._peers.values()):
            if was_suspended:
                peer.suspended(late_s)
            elif late_s <= max(SWEEP_S, 1.0):  # else the loop was blocked and has not read yet
                self._check_peer(peer, now_s)
        if not was_suspended and late_s <= max(SWEEP_S, 1.0):
            self._socket.give_up_slow()
        self._sweep_soon()

    def _check_peer(self, peer: ClientPeer, now_s: float) -> None:
        connection = peer.connection
        if not peer.is_welcome:
            if now_s - connection.opened_s > HELLO_S:
                self._disconnect(peer)
        elif peer.full_s is not None and now_s - peer.full_s > STALL_S:
            self._disconnect(peer)
        elif connection.is_waiting or peer.parsing is not None:
            peer.heard_s = now_s  # it has input that was not read yet
        elif connection.begun_s is None:
            if now_s - peer.heard_s > SILENCE_S:
                message = f"no message from the client for {SILENCE_S:g} s"
                self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
        elif now_s - connection.begun_s > MESSAGE_S:
            message = f"a message took more than {MESSAGE_S:g} s to arrive"
            self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))

    # ------------------------------------------------------------------------------------------------------- close

    def fail_all(self, error: ApiError) -> None:
        """Fail every request, including those whose clients have granted no credit, and whose message is being
        parsed."""
        for peer in self._peers.values():
            if peer.parsing is not None:
                peer.failure = error
                peer.parsing.cancel()
            for stream, _ in peer.streams.values():
                stream.fail(error)

    def close(self) -> None:
        """Close all connections; `wait_closed` waits for their buffered output."""
        if not self._is_closed:
            self._is_closed = True
            if self._sweeper is not None:
                self._sweeper.cancel()
            for peer in list(self._peers.values()):
                self._send_pending(peer)
                self._release(peer)
            self._socket.close(LINGER_S)

    async def wait_closed(self) -> None:
        """Wait until buffered output is sent or LINGER_S has passed."""
        await self._socket.wait_closed()
