"""Relays requests to replicas: reads their bodies, bounds what open requests keep, and counts what became of them."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Iterator

from aiohttp import web

from pipeline.deploy import prompts
from pipeline.deploy.proxy.client_writer import ClientWriter
from pipeline.deploy.proxy.deadline import TIMED_PATHS, Deadline
from pipeline.deploy.proxy.forwarding import BODILESS
from pipeline.deploy.proxy.relay_counts import RelayCounts
from pipeline.deploy.proxy.relayed_request import RelayedRequest
from pipeline.deploy.replicas import ReplicaSet
from pipeline.http_server import time_left
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.bodies import body_reader
from pipeline.http_server.bodies.body_reader import BodyReader, OutOfTime
from pipeline.http_server.errors import overloaded, timeout_error
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.routing.policies import Prompt

NUM_HELD_BODIES = 256
"""Bodies of the largest size that open requests may keep, for another attempt. At 4 MiB each, that is 1 GiB."""


class Relay:
    """Handles requests for replicas."""

    def __init__(
        self,
        replicas: ReplicaSet,
        bodies: BodyReader,
        *,
        wait_s: float,
        resume_timeout_s: float,
        slow_client_s: float,
        max_held_bytes: int,
        request_timeout_s: float,
        unread: UnreadReplies,
        shares_cache: bool = False,
    ) -> None:
        """A request waits `wait_s` for a replica, and a stream that was lost `resume_timeout_s`. A client that takes
        nothing for `slow_client_s` is disconnected. All open requests together keep `max_held_bytes` of bodies. A
        request without a `timeout_s` of its own has `request_timeout_s`; 0 is unlimited. `unread` counts what clients
        have not taken. `shares_cache`: replicas share their prefix cache between API keys."""
        self._replicas = replicas
        self._bodies = bodies
        self.slow_client_s = slow_client_s
        self.unread = unread
        self._max_held_bytes = max_held_bytes
        self.num_held_bytes = 0
        self._wait_s = wait_s
        self._resume_timeout_s = resume_timeout_s
        self._request_timeout_s = request_timeout_s
        self._shares_cache = shares_cache
        self.counts = RelayCounts()
        self.num_open = 0
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()

    async def handle(self, http_request: web.Request) -> web.StreamResponse:
        """Serve a request at one of the replicas. Raises ApiError."""
        self.counts.num_requests += 1
        self.num_open += 1
        self.idle.clear()
        received_s, given_s = time.monotonic(), math.inf
        try:
            body, prompt, timeout_s = b"", Prompt(1), None
            if http_request.method not in BODILESS:
                given_s = time_left.of_headers(http_request.headers)
                left_s = min(self._request_timeout_s or math.inf, given_s)
                read = functools.partial(_read, scope="" if self._shares_cache else current_scope())
                parts = await self._bodies.parse(  # whether the model takes images is for the replicas to know
                    http_request, read, body_reader.BODY_TIMEOUT_S, left_s, takes_images=True
                )
                body, prompt, timeout_s = parts
            if http_request.path not in TIMED_PATHS:
                timeout_s = None
            deadline = Deadline(received_s, timeout_s or self._request_timeout_s, given_s)
            with self.hold(len(body)):
                client = ClientWriter(http_request, self.slow_client_s, self.unread)
                relayed = RelayedRequest(self.counts, self._replicas, http_request, client, body, deadline)
                return await relayed.run(prompt, self._wait_s, self._resume_timeout_s)
        except OutOfTime:
            raise timeout_error(self._request_timeout_s or given_s) from None
        except ConnectionError:
            return web.Response()  # the client has disconnected
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Count a body while its request is open. Raises ApiError, 503."""
        num_left = self._max_held_bytes - self.num_held_bytes
        if num_bytes > num_left:
            message = f"{num_left} of {self._max_held_bytes} bytes are free for the bodies of open requests"
            raise overloaded(f"{message}, and this one has {num_bytes}")
        self.num_held_bytes += num_bytes
        try:
            yield
        finally:
            self.num_held_bytes -= num_bytes


def _read(body: bytes, scope: str) -> tuple[bytes, Prompt, float | None]:
    """A body, what the router must know of it, and its `timeout_s`."""
    return body, *(prompts.read(body, scope) if body else (Prompt(1), None))
