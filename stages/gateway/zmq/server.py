"""The ZeroMQ server: clients that use pipeline.client.protocol. They open requests in the same table as HTTP clients,
by the same rules.

    client ──Hello, Generate, Abort, Credit, Ping──► ZmqServer ──► RequestTable.open ──► the stages
    client ◄──Accepted, Delta, Finished, Failed──── ZmqStream ◄──wake── RequestTable

Everything that a client can make the gateway keep is bounded: messages (their size and number), connections, requests
(the gateway's credits), and output (deltas merge, other messages have a bound). A client that violates the protocol
gets one error and loses its connection; other clients are not affected.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, assert_never

import msgspec

from pipeline.client import protocol as p
from pipeline.http_server.access.guard import unauthorized
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.runtime.security.api_keys import NO_SCOPE, Keys
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.stages.gateway.errors import ApiError, overloaded
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.received import ZMQ, Received, adapter_of
from pipeline.stages.gateway.replayed import SHUTTING_DOWN, UNLOADED
from pipeline.stages.gateway.zmq import errors, zmtp
from pipeline.stages.gateway.zmq.connection import Connection
from pipeline.stages.gateway.zmq.frame_budget import MIN_BYTES_PER_S
from pipeline.stages.gateway.zmq.handshake import MAX_HELLO_BYTES, scope_of, welcome_of
from pipeline.stages.gateway.zmq.large_messages import Data, LargeMessages
from pipeline.stages.gateway.zmq.listener import ZmtpListener
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, ReceivedMessage, parse_generate
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.peer_sender import PeerChannel, PeerSender
from pipeline.stages.gateway.zmq.serving import sleep
from pipeline.stages.gateway.zmq.serving.model import Choose, limits_of, refusal_of
from pipeline.stages.gateway.zmq.serving.server_log import ServerLog
from pipeline.stages.gateway.zmq.stream import ZmqStream
from pipeline.stages.gateway.zmq.sweeper import Sweeper

if TYPE_CHECKING:
    from pipeline.stages.gateway.stage import GatewayStage

HELLO = -1
"""In place of a request's id: a client's hello waits."""
LINGER_S = 0.5
"""Time to send buffered output when the stage stops."""


class ZmqServer:
    """The clients and their open requests."""

    def __init__(
        self,
        address: str,
        choose: Choose,
        accounts: KeyAccounts,
        max_message_bytes: int,
        tasks: asyncio.TaskGroup,
        unread: UnreadReplies,
        keys: Keys | None = None,
        needs_key: bool = True,
        addresses: Sequence[str] = (),
        gateway: int = 0,
        access_log: AccessLog | None = None,
    ) -> None:
        """Listen. `choose` finds a connection's model. With `keys` and `needs_key`, clients must send one of them.
        `addresses` are of all gateways, `gateway` is this one's index, and `unread` counts messages that connections
        have not sent. Raises UserError if it can't listen."""
        self._choose, self._accounts, self._tasks = choose, accounts, tasks
        self._max_message_bytes, self._keys, self._needs_key = max_message_bytes, keys, needs_key
        self.addresses = list(addresses) or [address]
        """Of all gateways. A client learns them when it connects."""
        self._gateway, self._server_log, self._is_closed = gateway, ServerLog(access_log), False
        self._loop, self._log = asyncio.get_running_loop(), logging.getLogger("pipeline")
        self._decoder: MessageDecoder[ReceivedMessage] = MessageDecoder(ReceivedMessage)
        self._peers: dict[Connection, ClientPeer] = {}
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
        self._sender = PeerSender(
            self._socket, self._peers, unread, on_stuck=self._disconnect, on_crowded=self._end_crowded
        )
        self._sweeper = Sweeper(self._socket, self._peers, drop=self._drop, disconnect=self._disconnect)
        self._large_messages = LargeMessages(self._decode)

    async def start(self) -> None:
        """Accept clients."""
        await self._socket.start()

    # ----------------------------------------------------------------------------------------------------- receive

    def _opened(self, connection: Connection) -> None:
        self._peers[connection] = ClientPeer(connection, self._loop.time())
        self._sweeper.start()

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
            await peer.model.until_loaded(len(data))
            account_of = self._accounts.of_scope
            found = await self._large_messages.read(
                *(data, peer.scope, lambda: self._limits_of(peer)),
                lambda: refusal_of(peer.model, account_of(peer.scope)),
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
        return limits_of(peer.model, self._accounts.of_scope(peer.scope))

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
                elif request_id in peer.waiting:
                    peer.waiting[request_id].cancel()
            case p.Ping(nonce):
                if peer.full_s is None:  # else the buffered output is a sign of life
                    self._sender.post(peer, p.Pong(nonce))
            case p.SetSleep() | p.AskSleep():
                peer.ask(sleep.answer(peer, message, PeerChannel(self._sender, peer)))
            case p.Bye():
                self._disconnect(peer)
            case _:
                assert_never(message)

    def _welcome(self, peer: ClientPeer, hello: p.Hello) -> None:
        if peer.is_welcome:
            raise errors.of_peer("hello was already sent on this connection", "malformed")
        peer.scope = scope_of(hello, self._keys, needs_key=self._needs_key)
        peer.model = self._choose(hello.model, peer.scope)
        if not peer.model.is_loaded:  # the first one: what a client learns of it is not known before
            self._wait(peer, HELLO, lambda: self._admit(peer, hello), 0)
        else:
            self._admit(peer, hello)

    def _admit(self, peer: ClientPeer, hello: p.Hello) -> None:
        """Say what the client needs to know of its model."""
        facts = peer.model.readiness.require_ready()
        peer.is_welcome = True
        self._socket.welcome(peer.connection, peer.scope)
        client = hello.client[: p.MAX_CLIENT_CHARS]
        self._log.debug("client connected", extra={"fields": {"client": client, "clients": len(self._peers)}})
        self._sender.post(
            peer,
            welcome_of(
                facts,
                peer.model.limits,
                max_message_bytes=self._max_message_bytes,
                addresses=self.addresses,
                gateway=self._gateway,
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
        if not peer.model.is_loaded:
            self._wait(peer, request_id, lambda: self._handle(peer, message, data), len(data))
            return
        begin_s, account = self._loop.time(), self._accounts.of_scope(peer.scope)
        try:
            peer.model.readiness.require_ready()
            if account is not None:
                account.arrive()
            parsed = parse()
            assert parsed is not None
            if isinstance(parsed, ApiError):  # not raised: its traceback would keep this frame and the message
                self._refused(peer, message, begin_s, parsed)
                return
            limits, requests = self._limits_of(peer), peer.model.requests
            received = Received(
                api=ZMQ, body=bytes(data), scope=peer.scope, models=limits.allowed, adapter=adapter_of(parsed)
            )
            request = requests.open(received.complete(parsed, limits), received)
        except ApiError as error:
            self._refused(peer, message, begin_s, error)
            return
        stream = ZmqStream(request_id, message.credits, request, requests)
        task = self._tasks.create_task(self._run(peer, stream, begin_s))
        peer.streams[request_id] = stream, task

    def _wait(self, peer: ClientPeer, request_id: int, then: Callable[[], None], num_bytes: int) -> None:
        """Have a client's model loaded first, for a message of this size."""
        peer.waiting[request_id] = self._tasks.create_task(self._when_loaded(peer, request_id, then, num_bytes))

    async def _when_loaded(self, peer: ClientPeer, request_id: int, then: Callable[[], None], num_bytes: int) -> None:
        """Have a client's model loaded, and go on with its request, or with its hello."""
        error: ApiError | None = None
        try:
            with peer.model.use():
                await peer.model.until_loaded(num_bytes)
                peer.waiting.pop(request_id, None)
                then()
        except asyncio.CancelledError:
            error = ApiError(HTTPStatus.BAD_REQUEST, "aborted while the model was loaded", code="aborted")
        except ApiError as refusal:
            error = refusal
        peer.waiting.pop(request_id, None)
        if error is None or self._peers.get(peer.connection) is not peer:
            return
        if request_id == HELLO:
            self._drop(peer, error)
        else:
            self._sender.post(peer, p.Failed(request_id, errors.on_the_wire(error)))

    def _require_new(self, peer: ClientPeer, request_id: int) -> None:
        """Raises ApiError if the id is in use."""
        if request_id in peer.streams or request_id in peer.waiting:
            raise errors.of_peer(f"request_id {request_id} is already open on this connection", "duplicate_id")

    def _refused(self, peer: ClientPeer, message: ReceivedGenerate, begin_s: float, error: ApiError) -> None:
        if (account := self._accounts.of_scope(peer.scope)) is not None:
            account.refused(error.status)
        self._sender.post(peer, p.Failed(message.request_id, errors.on_the_wire(error)))
        self._server_log.over(peer, begin_s, message.name or "", error)

    async def _run(self, peer: ClientPeer, stream: ZmqStream, begin_s: float) -> None:
        try:
            with peer.model.use():
                await stream.run(PeerChannel(self._sender, peer))
        finally:
            peer.streams.pop(stream.request_id, None)
            self._server_log.over(peer, begin_s, stream.request.id, stream.error, stream)

    # -------------------------------------------------------------------------------------------------- disconnect

    def _drop(self, peer: ClientPeer, error: ApiError) -> None:
        """Send an error and end the connection."""
        self._sender.send_last(peer, p.Error(errors.on_the_wire(error)))
        self._disconnect(peer)

    def _disconnect(self, peer: ClientPeer) -> None:
        """Abort a client's requests and end its connection."""
        self._release(peer)
        self._socket.end(peer.connection)

    def _give_up(self, connection: Connection) -> None:
        """Its message is too slow, and others need room."""
        message = f"a message arrived slower than {MIN_BYTES_PER_S} bytes/s while other clients needed its room"
        self._drop(self._peers[connection], ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
        self._server_log.ended("their messages arrived too slowly")

    def _make_room(self, connection: Connection) -> None:
        """All places for connections are taken, and this one has no open request."""
        peer = self._peers[connection]
        if peer.is_welcome:
            self._drop(peer, overloaded("another client needed this connection's place"))
        else:
            self._disconnect(peer)
        self._server_log.ended("others needed their places")

    def _end_crowded(self, peer: ClientPeer) -> None:
        """What waits for all clients takes too much room, and most of it is for this one's key."""
        self._disconnect(peer)
        self._server_log.ended("they did not take their messages")

    def drop_unknown_keys(self) -> None:
        """The server's keys have changed: end connections whose key is none any more."""
        assert self._keys is not None
        for peer in list(self._peers.values()):
            if peer.scope != NO_SCOPE and self._keys.of_scope(peer.scope) is None:
                self._drop(peer, unauthorized(True, "`api_key` in hello"))

    def _release(self, peer: ClientPeer) -> None:
        self._peers.pop(peer.connection, None)
        self._sender.forget(peer)
        if peer.parsing is not None:
            peer.parsing.cancel()
        for task in (*peer.waiting.values(), *peer.asking):
            task.cancel()
        for stream, task in peer.streams.values():
            stream.release()
            task.cancel()

    def _ended(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection in self._peers:
            self._release(self._peers[connection])

    # ------------------------------------------------------------------------------------------------------- close

    def fail_all(self, error: ApiError, gateway: "GatewayStage | None" = None) -> None:
        """Fail every request, or those of one of several models, also if its client has granted no credit, and whose
        message is being parsed. Clients of a model that is unloaded connect again, and go on when it is loaded."""
        for peer in list(self._peers.values()):
            if gateway is not None and not (peer.is_welcome and peer.model.is_of(gateway)):
                continue
            if gateway is not None and error in (SHUTTING_DOWN, UNLOADED) and peer.streams:
                self._disconnect(peer)
            elif peer.parsing is not None:
                peer.failure = error
                peer.parsing.cancel()
            for stream, _ in peer.streams.values():
                stream.fail(error)

    def leave(self) -> None:
        """Another server has this address: accept no more clients, and end connections when nothing is open on them."""
        self._socket.stop()
        self._sweeper.leave()

    def close(self) -> None:
        """Close all connections; `wait_closed` waits for their buffered output."""
        if not self._is_closed:
            self._is_closed = True
            self._sweeper.close()
            for peer in list(self._peers.values()):
                self._sender.flush(peer)
                self._release(peer)
            self._socket.close(LINGER_S)

    async def wait_closed(self) -> None:
        """Wait until buffered output is sent or LINGER_S has passed."""
        await self._socket.wait_closed()
