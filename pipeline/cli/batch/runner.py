"""Sends the requests of a batch, a bounded number at once, until each has a reply."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from pipeline.cli.batch.lines import BatchLine
from pipeline.cli.batch.replies import Reply, Response
from pipeline.cli.bench.client import UNAUTHORIZED, no_connection, reason_of, refusal_of
from pipeline.errors import UserError

BUSY = (425, 429, 502, 503)
"""Answers to a request that is sent again: the server is full, loads a model, or was replaced. 504 is none: the
request's own time was too short."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 5.0
CONNECT_S = 10.0
READ_S = 3600.0
"""The longest time without a byte of a reply: it comes as a whole. Then the host may be gone."""


class BatchRunner:
    """The requests of one run."""

    def __init__(
        self, url: str, api_key: str | None, max_open: int, timeout_s: float, write: Callable[[Reply], None]
    ) -> None:
        """`timeout_s` is the longest time in which a request is refused, or no server is there."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._max_open, self._timeout_s, self._write = max_open, timeout_s, write

    async def run(self, lines: Iterable[BatchLine]) -> None:
        """Answer all lines. Raises UserError if the server stays away, and OSError if a reply can't be written."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
        waiting = iter(lines)
        async with aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
        ) as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._max_open):
                        tasks.create_task(self._answer_each(session, waiting))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from group

    async def _answer_each(self, session: aiohttp.ClientSession, waiting: Iterable[BatchLine]) -> None:
        for line in waiting:  # all tasks share it
            self._write(await self._answer(session, line))

    async def _answer(self, session: aiohttp.ClientSession, line: BatchLine) -> Reply:
        pause_s, end_s = FIRST_PAUSE_S, time.monotonic() + self._timeout_s
        while True:
            try:
                async with session.post(f"{self._url}{line.url}", data=bytes(line.body)) as response:
                    body = await response.read()
                if response.status == UNAUTHORIZED:
                    raise UserError(f"{self._url}{line.url} answered 401: {refusal_of(401, body)}")
                if response.status not in BUSY:
                    return _reply(line, response, body)
                why = f"answered {response.status}: {refusal_of(response.status, body)}"
            except aiohttp.ClientConnectorError as error:
                why = f"is not there: {no_connection(self._url, error)}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                why = f"broke the connection: {reason_of(error)}"
            if time.monotonic() + pause_s > end_s:
                raise UserError(
                    f"{self._url}{line.url} {why}, for {self._timeout_s:g} s (--timeout); the replies so far are kept: "
                    "run the command again to go on"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)


def _reply(line: BatchLine, response: aiohttp.ClientResponse, body: bytes) -> Reply:
    request_id = response.headers.get("X-Request-Id", "")
    found = _json_of(body)
    error = None
    if response.status >= 400:
        error = {"code": str(response.status), "message": refusal_of(response.status, body)}
    return Reply(
        f"batch_req_{request_id or line.custom_id}", line.custom_id, Response(response.status, request_id, found), error
    )


def _json_of(body: bytes) -> Raw:
    """A body in one line; as a string if it is not JSON."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
    return Raw(body) if b"\n" not in body and b"\r" not in body else Raw(msgspec.json.encode(decoded))
