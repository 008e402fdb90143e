"""Reads large messages of ZeroMQ clients in a thread, in turns that are fair to keys, as large bodies over HTTP are.

    message ──turn──► thread: decode, parse ──► the message, and its request or why there is none

If no request is admitted now, because its key has used its limit, only what the refusal needs is decoded: the rest may
be a million objects.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from pipeline.http_server.bodies.body_reader import TURN_TIMEOUT_S
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
            with without_gc():
                return LargeMessage(message, measured(parse_generate(message, limits)))
        except ApiError as error:
            return LargeMessage(message, error.with_traceback(None))  # else it would keep the message
