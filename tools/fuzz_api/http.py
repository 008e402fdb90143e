"""Sends cases over kept connections and judges the replies."""

import asyncio
import json
from urllib.parse import urlsplit

from tools.fuzz_api.cases import Case, form_problem
from tools.fuzzing.replies import FramingError, Reply, ReplyReader

EXPECTED = (503, 504)
"""Statuses above 499 that a server may answer: it is overloaded, or the request gave itself too little time."""
BAD_CODES = (b'"code":"stage_died"', b'"code":"internal', b"internal server error")


class Problem(Exception):
    """A reply that a client should never get."""


class Client:
    """One connection after another to the server."""

    def __init__(self, url: str, deadline_s: float) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._deadline_s = deadline_s
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, case: Case) -> Reply:
        """Returns the reply. Raises Problem."""
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await self._exchange(case)
        except TimeoutError:
            self.close()
            raise Problem(f"no complete reply within {self._deadline_s:g} s") from None
        except (FramingError, ConnectionError) as error:
            self.close()
            raise Problem(f"{type(error).__name__}: {error}") from error
        if problem := problem_of(case, reply):
            raise Problem(problem)
        return reply

    async def _exchange(self, case: Case) -> Reply:
        is_fresh = self._writer is None
        reader, writer = await self._connected()
        replies = ReplyReader()
        replies.expect(case.method)
        try:
            writer.write(case.encoded())
            while True:
                data = await reader.read(1 << 16)
                if not data and not is_fresh and replies.has_no_byte:  # it was closed between two requests
                    self.close()
                    return await self._exchange(case)
                done = replies.feed(data) if data else replies.end()
                if done:
                    break
                if not data:
                    raise FramingError("the connection ended without a reply")
        except ConnectionResetError:
            if is_fresh or not replies.has_no_byte:
                raise
            self.close()
            return await self._exchange(case)
        if done[0].closes:
            self.close()
        return done[0]

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self._reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


def problem_of(case: Case, reply: Reply) -> str:
    """What is wrong with a reply; empty if nothing is."""
    path = case.path.partition("?")[0]
    if reply.status >= 500 and (reply.status not in EXPECTED or path == "/health"):
        return f"status {reply.status}: {reply.body[:300]!r}"
    kind = reply.headers.get("content-type", "").partition(";")[0]
    body = reply.body
    if reply.status >= 400:
        try:
            return form_problem(path, json.loads(body))
        except ValueError:
            return f"the error is not JSON: {body[:200]!r}"
    for code in BAD_CODES:
        if code in body and not path.endswith(".json"):
            return f"a failure of the server within a reply: {body[-300:]!r}"
    try:
        if kind == "application/json":
            json.loads(body)
        elif kind == "application/x-ndjson":
            for line in body.decode().strip("\n").split("\n"):  # splitlines knows more separators than JSON
                json.loads(line)
        elif kind == "text/event-stream":
            body.decode()
            if not body.endswith(b"\n\n"):
                return f"the last event is not complete: {body[-200:]!r}"
    except ValueError as error:
        return f"the reply is not {kind}: {error}: {body[-200:]!r}"
    return ""
