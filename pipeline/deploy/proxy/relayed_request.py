"""Relays one request to a replica, and to another one if that fails.

    lease ──► send ──► head ──┬── a whole reply: collected, then sent
                              └── a stream: each part is passed on as it arrives
    a replica dies, or ends the stream because it stops or one of its stages died:
        nothing was passed on        the request is sent again as it was
        the stream has points        it is continued behind the last one: no token is lost, repeated or contradicted
        it has none                  the stream ends with an error event

A request may be what kills replicas. So one that loses MAX_DEATHS of them without output in between is not sent again.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from http import HTTPStatus

from aiohttp import web

from pipeline.deploy.proxy.client_writer import ClientWriter
from pipeline.deploy.proxy.deadline import Deadline, DeadlinePassed
from pipeline.deploy.proxy.forwarding import BODILESS, end_to_end, head_bytes, uses_resume_points
from pipeline.deploy.proxy.relay_counts import RelayCounts
from pipeline.deploy.proxy.relay_errors import RelayError
from pipeline.deploy.proxy.resumable_stream import ResumableStream
from pipeline.deploy.proxy.upstream import Connection, Head, UpstreamLost
from pipeline.deploy.replicas import NoReplica, Numbers, ReplicaLease, ReplicaSet
from pipeline.http_server import request_turns, time_left
from pipeline.http_server.apis.table import FAMILIES, family_of
from pipeline.http_server.errors import ApiError, timeout_error
from pipeline.routing.policies import Prompt
from pipeline.runtime.resume_points import RESUMABLE, RESUME

MAX_DEATHS = 3
"""Replicas that a request may lose without output in between."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
RETRIED = ("stage_died", "shutting_down", "draining", "stage_unresponsive", "late", "output_lost")
"""Codes of errors that are about the replica and not about the request. `late` is what replicas of the release before
say for `stage_unresponsive`."""
MAX_REPLY_BYTES = 4 * 1024 * 1024
"""A whole reply is collected up to this size, so that it can be asked for again. A longer one is passed on."""
NO_ERROR_BODY = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What looking for an error in a body raises that has none."""
STREAM_TYPES = tuple({family.media_type for family in FAMILIES})

log = logging.getLogger("pipeline.deploy")


class Attempt:
    """A request at one replica; the sink of its response."""

    def __init__(self, relayed: "RelayedRequest", lease: ReplicaLease) -> None:
        self._relayed = relayed
        self._lease = lease
        self.response: Head | None = None
        self.body = bytearray()
        self.is_stream = False

    def head(self, head: Head) -> None:
        self.response = head
        kind = head.get("content-type").partition(";")[0]
        self.is_stream = head.status == 200 and kind in STREAM_TYPES
        if self.is_stream:
            self._relayed.stream_begins(head, kind, self._lease)

    def data(self, data: bytes) -> None:
        if not self.is_stream and len(self.body) + len(data) > MAX_REPLY_BYTES:
            assert self.response is not None
            self._relayed.long_reply_begins(self.response, bytes(self.body))
            self.body.clear()
            self.is_stream = True
        if self.is_stream:
            self._relayed.pass_on(data, self._lease)
        else:
            self.body += data

    @property
    def error_code(self) -> str:
        """The code in the body of an error reply."""
        with contextlib.suppress(*NO_ERROR_BODY):
            return str(json.loads(self.body)["error"]["code"])
        return ""


class RelayedRequest:
    """One request, over all its attempts."""

    def __init__(
        self,
        counts: RelayCounts,
        replicas: ReplicaSet,
        http_request: web.Request,
        client: ClientWriter,
        body: bytes,
        deadline: Deadline,
    ) -> None:
        self._counts = counts
        self._replicas = replicas
        self._http_request = http_request
        self._body = body
        self._deadline = deadline
        self._client = client
        self._stream: ResumableStream | None = None
        """If the response is a stream with points."""
        self._family = family_of(http_request.rel_url.raw_path)
        self._is_long_reply = False
        """The response is a whole reply that is passed on as it arrives."""
        self._wants_resume_points = http_request.method == "POST" and not uses_resume_points(http_request.headers)
        """A client that asks for points itself gets them unchanged."""
        self._avoid: set[str] = set()
        self._num_deaths = 0
        self._num_tries = 0
        self._num_outputs = 0
        """Points with output at the last death."""
        self._numbers: Numbers | None = None
        """Those of the replica that the stream's output is from; None without output."""

    async def run(self, prompt: Prompt, wait_s: float, resume_timeout_s: float) -> web.StreamResponse:
        try:
            while True:
                lease = await self._lease(prompt, resume_timeout_s if self._client.has_begun else wait_s)
                try:
                    done = await self._attempt(lease)
                finally:
                    lease.end()
                if done is not None:
                    return done
                self._num_tries += 1
                if self._num_tries > 1:  # the first one is repeated at once
                    async with self._deadline.bound():
                        await asyncio.sleep(min(BACKOFF_S * 2 ** (self._num_tries - 2), MAX_BACKOFF_S))
        except RelayError as error:
            return await self._refuse(error)
        except DeadlinePassed:
            return await self._refuse(self._timed_out())

    async def _lease(self, prompt: Prompt, wait_s: float) -> ReplicaLease:
        """Raises RelayError if there is no replica for too long, and DeadlinePassed."""
        end_s = time.monotonic() + wait_s
        changed = self._replicas.routed.changed
        while True:
            changed.clear()
            try:
                async with self._deadline.bound():
                    return await self._replicas.lease(prompt, self._avoid, self._numbers)
            except NoReplica as error:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise RelayError(f"no replica has taken requests for {wait_s:g} s", "no_replica") from error
                with contextlib.suppress(TimeoutError):
                    async with self._deadline.bound(), asyncio.timeout(min(left_s, 1.0)):
                        await changed.wait()
                        await request_turns.another_turn(self._http_request)

    async def _attempt(self, lease: ReplicaLease) -> web.StreamResponse | None:
        """One attempt. Returns the response if it is complete; None if another attempt is to be made. Raises RelayError
        if no other one can be."""
        attempt = Attempt(self, lease)
        try:
            await self._exchange(lease, attempt)
        except UpstreamLost as error:
            if error.is_own_fault:
                lease.doubted()
            else:
                lease.failed()
            self._replica_lost(lease, str(error))
            return None
        assert attempt.response is not None
        if attempt.is_stream:
            return await self._stream_ended(lease)
        return await self._reply(lease, attempt, attempt.response)

    async def _exchange(self, lease: ReplicaLease, attempt: Attempt) -> None:
        """Send the request and take its response. Raises UpstreamLost, and DeadlinePassed if that was not possible in
        time. The replica ends it if its time passes from then on."""
        async with self._deadline.bound():
            connection = await lease.upstream.connect()
        try:
            try:
                await self._drive(connection, attempt)
            except UpstreamLost:
                if connection.has_begun or not connection.was_used:
                    raise
                # It was kept alive, and the gateway has closed it meanwhile: that says nothing about the replica.
                lease.upstream.give_back(connection)
                async with self._deadline.bound():
                    connection = await lease.upstream.connect(fresh=True)
                await self._drive(connection, attempt)
        finally:
            lease.upstream.give_back(connection)

    async def _drive(self, connection: Connection, attempt: Attempt) -> None:
        client = self._client
        client.pause = connection.pause
        done = connection.send(*self._request(), sink=attempt, has_body=self._http_request.method != "HEAD")
        done.add_done_callback(lambda _: client.wake.set())
        try:
            while not done.done() or client.must_flush:
                await client.wake.wait()
                client.wake.clear()
                if client.must_flush:
                    await client.flush()
                    connection.resume()
            done.result()
        finally:
            client.pause = lambda: None  # the connection may soon have another request
            if not done.done():
                done.cancel()
                connection.close()
            elif not done.cancelled():
                done.exception()  # was raised above, or is superseded by the client's end

    def _request(self) -> list[bytes]:
        """The parts of the request for the replica, with the points behind which it is to continue. The body is no
        copy: `hold` counts it once."""
        request, points = self._http_request, b""
        if self._stream is not None and self._client.has_begun:
            points = b"".join(self._stream.points)
        extra = {RESUMABLE: "1"} if self._wants_resume_points else {}
        if points:
            extra[RESUME] = str(len(points))
        if (left_s := self._deadline.left_s) < math.inf and request.method not in BODILESS:
            extra[time_left.HEADER] = time_left.written(left_s)
        return [head_bytes(request, len(points) + len(self._body), extra), points, self._body]

    # ------------------------------------------------------------------------------------- called as the response comes

    def stream_begins(self, head: Head, kind: str, lease: ReplicaLease) -> None:
        """The head of a stream has arrived, perhaps of one that is continued."""
        before, self._numbers = self._numbers, lease.numbers
        if before is not None and not lease.numbers.continues(before):
            self._counts.num_inexact += 1
            fields = {"replica": lease.name, "backend": lease.numbers.backend, "before": before.backend}
            fields |= {"path": self._http_request.path}
            log.warning("stream continued inexactly: its ids may differ from here on", extra={"fields": fields})
        if self._client.has_begun:
            return
        is_plain = head.get("content-encoding").lower() in ("", "identity")
        has_resume_points = self._wants_resume_points and is_plain and bool(head.get(RESUMABLE.lower()))
        self._stream = ResumableStream() if has_resume_points else None
        self._client.response = web.StreamResponse(headers=self._passed(head))

    def long_reply_begins(self, head: Head, begin: bytes) -> None:
        """A whole reply is too long to be collected: pass it on. Raises ValueError if it is instead of the rest of a
        stream."""
        if self._client.has_begun:
            raise ValueError(f"its reply is longer than {MAX_REPLY_BYTES} bytes")
        response = web.StreamResponse(status=head.status, headers=self._passed(head))
        if length := head.get("content-length"):
            response.content_length = int(length)
        self._client.response, self._is_long_reply = response, True
        self._client.write(begin)

    def _passed(self, head: Head) -> list[tuple[str, str]]:
        """The headers of a replica's response that the client gets."""
        passed = end_to_end(head.headers)
        if self._wants_resume_points:  # the ingress asked for them
            return [(name, value) for name, value in passed if name.lower() != RESUMABLE.lower()]
        return passed

    def pass_on(self, data: bytes, lease: ReplicaLease) -> None:
        stream = self._stream
        if stream is None:
            lease.first_token(time.monotonic())
            self._client.write(data)
            return
        num_before = stream.num_outputs
        self._client.write(stream.feed(data))
        if stream.num_outputs > num_before:
            lease.first_token(time.monotonic())

    # ---------------------------------------------------------------------------------------------------------- the end

    async def _stream_ended(self, lease: ReplicaLease) -> web.StreamResponse | None:
        """The response of a replica has ended properly."""
        stream = self._stream
        if stream is not None and stream.failure is not None and stream.failure in RETRIED:
            self._replica_lost(lease, f"it ended the stream with {stream.failure}")
            return None
        if stream is not None:
            self._client.write(stream.rest())
        return await self._client.end()

    def _replica_lost(self, lease: ReplicaLease, why: str) -> None:
        """Prepare another attempt. Raises RelayError if there can't be one."""
        self._avoid.add(lease.name)
        stream = self._stream
        num_outputs = 0 if stream is None else stream.num_outputs
        if num_outputs > self._num_outputs:
            self._num_deaths = self._num_tries = 0
        self._num_deaths += 1
        self._num_outputs = num_outputs
        has_begun = self._client.has_begun
        fields = {"replica": lease.name, "why": why, "path": self._http_request.path, "deaths": self._num_deaths}
        if self._num_deaths >= MAX_DEATHS:
            log.error("request given up", extra={"fields": fields})
            self._counts.num_broken += has_begun
            message = f"{MAX_DEATHS} replicas were lost while they worked on this request"
            raise RelayError(message, "replica_died")
        if has_begun and (stream is None or not stream.is_resumable):
            self._counts.num_broken += 1
            log.warning("stream broken", extra={"fields": fields})
            message = "the replica that served this stream was lost, and a stream of this kind can't be continued"
            raise RelayError(message, "replica_died")
        if not num_outputs:
            self._numbers = None
        if stream is not None:
            stream.lose()
        if has_begun:
            self._counts.num_resumed += 1
        else:
            self._stream = None
            self._counts.num_retried += 1
        log.info("stream continued" if has_begun else "request repeated", extra={"fields": fields})

    async def _reply(self, lease: ReplicaLease, attempt: Attempt, head: Head) -> web.StreamResponse | None:
        """A whole reply has arrived."""
        code = attempt.error_code if head.status >= 500 or head.status == 404 else ""
        if self._client.has_begun:  # instead of the rest of a stream
            if head.status == 503:
                self._replica_busy(lease)
                return None
            if code in RETRIED:
                self._replica_lost(lease, f"it answered {code}")
                return None
            if code == "timeout":
                raise self._timed_out()
            message = f"this stream can't be continued at another replica: {_message_of(attempt)}"
            raise RelayError(message, "not_resumed")
        others = [name for name in self._replicas.upstreams() if name not in self._avoid and name != lease.name]
        is_elsewhere = head.status == 404 and self._family.stores_replies
        if others and (head.status == 503 or is_elsewhere):
            self._counts.num_retried += 1
            self._avoid.add(lease.name)
            return None
        if code == "stage_died" or (head.status == 503 and code == "shutting_down"):
            self._replica_lost(lease, f"it answered {code}")
            return None
        lease.first_token(time.monotonic())
        is_head = self._http_request.method == "HEAD"
        if not attempt.body:
            headers = self._passed(head) + [("Content-Length", one) for one in head.all("content-length") if is_head]
            return web.Response(status=head.status, headers=headers)
        response = web.StreamResponse(status=head.status, headers=self._passed(head))
        response.content_length = len(attempt.body)
        self._client.response = response
        self._client.write(bytes(attempt.body))
        return await self._client.end()

    def _timed_out(self) -> RelayError:
        """The deadline has passed while no replica had the request."""
        timeout_s, status = self._deadline.timeout_s, HTTPStatus.GATEWAY_TIMEOUT
        if self._client.has_begun:
            message = f"the request timed out after {timeout_s:g} s, while it waited for a replica that continues it"
            return RelayError(message, "timeout", status)
        return RelayError(timeout_error(timeout_s).message, "timeout", status)

    def _replica_busy(self, lease: ReplicaLease) -> None:
        """A replica has no room for a stream that is to be continued."""
        self._avoid.add(lease.name)
        if len(self._avoid) >= len(self._replicas.upstreams()):
            self._avoid.clear()
        if self._num_tries > 30:
            raise RelayError("no replica had room to continue this stream", "overloaded")

    async def _refuse(self, error: RelayError) -> web.StreamResponse:
        """End with an error: as an event if the response has begun. Else raises ApiError."""
        fields = {"message": error.message, "type": "server_error", "param": None, "code": error.code}
        if self._is_long_reply:  # its client sees that the rest is missing
            self._client.abort()
            raise ConnectionResetError(error.message)
        if self._client.has_begun:
            self._client.write(self._family.lost_stream(fields))
            return await self._client.end()
        self._counts.num_unserved += 1
        raise ApiError(error.status, error.message, code=error.code)


def _message_of(attempt: Attempt) -> str:
    with contextlib.suppress(*NO_ERROR_BODY):
        return str(json.loads(attempt.body)["error"]["message"])
    return "the replica refused it"
