"""Sends cases over kept connections and judges the replies."""

import asyncio
import json
import re
import time
from urllib.parse import urlsplit

from tools.fuzz_api.cases import Case, form_problem
from tools.fuzzing.replies import FramingError, Reply, ReplyReader

OVERLOADED = (
    r"\d+ of \d+ (sequences|prompt tokens|bytes) are free",
    r"the limit of \d+ open (sequences|prompt tokens) is reached",
    r"\d+ of \d+ bytes are free for large bodies",
    r"other large bodies were parsed for",
    r"clients with other API keys needed the room",
    r"could not be checked in time: try again",
    r"the request was aborted before all of its inputs were computed",
)
"""What a 503 may say: others have the room that the request needs, or the time in which its constraint of the output,
which costs much, had to be checked; or another case has aborted it (/abort_requests). A single such request gets
none."""
TIMED_OUT = re.compile(r"the request timed out after ([\d.e+-]+) s, ")
"""What a 504 says: with the `timeout_s` that the request gave itself. The fuzzed server has none of its own."""
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
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await self._exchange(case)
        except TimeoutError:
            self.close()
            raise Problem(f"no complete reply within {self._deadline_s:g} s") from None
        except (FramingError, ConnectionError) as error:
            self.close()
            raise Problem(f"{type(error).__name__}: {error}") from error
        if problem := problem_of(case, reply, time.monotonic() - began_s):
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


def is_expected(status: int, message: str, took_s: float) -> bool:
    """Whether a server may answer so to a request: it is overloaded, or the request gave itself too little time."""
    if status == 503:
        return any(re.search(pattern, message) for pattern in OVERLOADED)
    match = TIMED_OUT.search(message) if status == 504 else None
    return match is not None and 0 < float(match[1]) <= took_s


def reason_of(reply: Reply) -> str:
    """What an error above 499 says, without its numbers."""
    return re.sub(r"[\d.]+", "N", reply.body.decode(errors="replace"))[:120] if reply.status >= 500 else ""


def problem_of(case: Case, reply: Reply, took_s: float) -> str:
    """What is wrong with a reply that took so long; empty if nothing is."""
    path = case.path.partition("?")[0]
    if reply.status >= 500 and (path == "/health" or not is_expected(reply.status, reply.body.decode(), took_s)):
        return f"status {reply.status} after {took_s:.3f} s: {reply.body[:300]!r}"
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
