"""Reads large messages of ZeroMQ clients in a thread, in turns that are fair to keys, as large bodies over HTTP are.

    message ──turn──► thread: decode, parse ──► the message, and its request or why there is none

The decoder holds Python's lock until all is decoded, and an entry of a list may be one byte, so what would take too
long is refused before, as in the bodies of HTTP.

If no request is admitted now, because its key has used its limit, only what the refusal needs is decoded: the rest may
be a million objects.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from pipeline.http_server.bodies.body_reader import TURN_TIMEOUT_S
from pipeline.http_server.bodies.json_depth import LOCK_MS, too_many_values
from pipeline.http_server.bodies.large_body_lock import LargeBodyLock
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.stages.gateway.admission.open_bytes import measured
from pipeline.stages.gateway.errors import ApiError, overloaded
from pipeline.stages.gateway.parsing.decode import without_gc
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, ReceivedMessage, parse_generate

Data = bytes | bytearray


class LargeMessage(NamedTuple):
    """What `LargeMessages.read` returns."""

    message: ReceivedMessage
    request: ParsedRequest | ApiError | None = None
    """That `message` asks for, or why there is none; None if it does not ask for one."""
    is_refused: bool = False
    """The request was not parsed, because none is admitted now."""


class LargeMessages:
    """Belongs to one loop."""

    def __init__(self, decode: Callable[[Data], ReceivedMessage]) -> None:
        """`decode` raises ApiError if a message is malformed. It is called in a thread."""
        self._decode = decode
        self._lock = LargeBodyLock()
        self._thread = WorkPool("parse-zmq")
        """The lock bounds what waits for it."""

    async def read(
        self,
        data: Data,
        scope: str,
        limits: Callable[[], RequestLimits],
        refusal: Callable[[], ApiError | None],
    ) -> LargeMessage:
        """Read a message of a key with this scope. When its turn has come, `limits` returns those of the key, and
        `refusal` why no request is admitted now, or None. Raises ApiError if the client violates the protocol, or if
        others had all turns."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(TURN_TIMEOUT_S):
                    turn = await stack.enter_async_context(self._lock.hold(len(data), scope))
            except TimeoutError:
                message = f"other large messages were parsed for {TURN_TIMEOUT_S:g} s"
                raise overloaded(message, by_size=True) from None
            bounds, why_not = limits(), refusal()
            # To its end, also if the client has left: the next message waits for it.
            return await self._thread.run_to_end(turn.run, lambda: self._read(data, bounds, why_not))

    def _read(self, data: Data, limits: RequestLimits, refusal: ApiError | None) -> LargeMessage:
        message = self._decode(data)
        if not isinstance(message, ReceivedGenerate):
            return LargeMessage(message)
        if refusal is not None:
            return LargeMessage(message, refusal, is_refused=True)
        try:
            check_cost(memoryview(message.request))
            with without_gc():
                return LargeMessage(message, measured(parse_generate(message, limits)))
        except ApiError as error:
            return LargeMessage(message, error.with_traceback(None))  # else it would keep the message


class _Head(NamedTuple):
    """What the first byte of a value says."""

    num_length: int
    """Bytes of the length behind it."""
    num_data: int
    """Bytes of data behind that, besides those of the length."""
    has_data: bool
    """The length counts bytes, not entries."""
    cost_ns: int


VALUE_NS, TEXT_NS, CONTAINER_NS = 20, 100, 250


def _head_of(code: int) -> _Head:
    match code:
        case _ if 0x80 <= code <= 0x9F or 0xDC <= code <= 0xDF:  # arrays and maps; their entries follow
            return _Head((2 << (code & 1)) if code >= 0xDC else 0, 0, False, CONTAINER_NS)
        case _ if 0xA0 <= code <= 0xBF:
            return _Head(0, code & 0x1F, True, TEXT_NS)
        case 0xC4 | 0xC5 | 0xC6:
            return _Head(1 << (code - 0xC4), 0, True, TEXT_NS)
        case 0xC7 | 0xC8 | 0xC9:  # extensions have a byte for their type
            return _Head(1 << (code - 0xC7), 1, True, TEXT_NS)
        case _ if 0xCA <= code <= 0xD3:  # floats and integers
            return _Head(0, (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)[code - 0xCA], True, VALUE_NS)
        case _ if 0xD4 <= code <= 0xD8:
            return _Head(0, 1 + (1 << (code - 0xD4)), True, TEXT_NS)
        case 0xD9 | 0xDA | 0xDB:
            return _Head(1 << (code - 0xD9), 0, True, TEXT_NS)
    return _Head(0, 0, True, VALUE_NS)


_HEADS = [_head_of(code) for code in range(256)]


def check_cost(data: bytes | bytearray | memoryview) -> None:
    """Raises ApiError, 400, if to decode this MessagePack would hold Python's lock for longer than LOCK_MS. Only the
    heads of its values are read: 0.3 µs each, and none after the limit."""
    at, left_ns, heads = 0, LOCK_MS * 1_000_000, _HEADS
    while at < len(data):
        num_length, num_data, has_data, cost_ns = heads[data[at]]
        at += 1
        if (left_ns := left_ns - cost_ns) < 0:
            raise too_many_values()
        if num_length and has_data:
            num_data += int.from_bytes(data[at : at + num_length], "big")
        at += num_length + num_data
