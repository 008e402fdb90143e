"""The access log: a line for each request that reached a listener, also if it was refused.

    {"ts":"2026-01-31T10:31:07.120Z","client":"127.0.0.1","key":"alice","method":"POST","path":"/v1/completions",
     "status":200,"request_id":"cmpl-…","model":"…","prompt_tokens":9,"cached_tokens":0,"output_tokens":5,
     "ttft_s":0.041,"total_s":0.093}

Clients choose some of it: the path, the model's name, the id. Each is bounded, and what is not printable is an escape.
No line has an API key, a header, a query or a part of a body.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from pipeline.config.sections.access_log import STANDARD_ERROR, AccessLogSettings
from pipeline.errors import UserError
from pipeline.http_server import request_ids
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.error_responses import ERROR, REQUEST_ID, id_in_headers
from pipeline.http_server.errors import truncated
from pipeline.runtime.log.log_file import LogWriter, RotatingFile, StandardError
from pipeline.runtime.log.printable import json_printable, printable
from pipeline.runtime.security.client_address import client_address

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
CLIENT_LEFT = 499
"""nginx's status for a client that disconnects before it has its response."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a line has besides its time."""

    client: str
    """The address; of IPv6 the /64 network."""
    key: str = ""
    """The name of the API key; none without a valid one."""
    method: str
    path: str
    status: int
    request_id: str = ""
    model: str = ""
    prompt_tokens: int | None = None
    """This and the others of output only for requests that were opened."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    """From the arrival of the request to its first token."""
    total_s: float
    """From the arrival of its head to the end of its response."""
    error: str = ""
    """The code, or the message if it has none, of an error; also of one in a stream."""


class Details(NamedTuple):
    """Of an opened request."""

    fields: Callable[[], dict[str, Any]]
    """Returns the fields of `Entry` that only its route knows."""


DETAILS = web.RequestKey("access_details", Details)


class AccessLog:
    """Writes the lines of one process."""

    def __init__(self, writer: LogWriter, form: str, name_of: Callable[[str], str]) -> None:
        """`form` is "json" or "text"; `name_of` returns the name of the key with a scope."""
        self.writer = writer
        self._is_json = form == "json"
        self._name_of = name_of
        self._encoder = msgspec.json.Encoder()

    @classmethod
    def of(cls, settings: AccessLogSettings, name_of: Callable[[str], str]) -> "AccessLog | None":
        """The log that the settings describe, or None. Raises UserError if the file can't be opened."""
        if not settings.file:
            return None
        file: RotatingFile | StandardError
        try:
            file = (
                StandardError()
                if settings.file == STANDARD_ERROR
                else RotatingFile(Path(settings.file), settings.max_bytes, settings.max_files)
            )
        except OSError as error:
            why = error.strerror or error
            if isinstance(error, FileNotFoundError):
                why = f"make the folder {Path(settings.file).parent} first"
            raise UserError(f"access_log.file: {settings.file} can't be written: {why}") from error
        return cls(LogWriter(file), settings.format, name_of)

    def wrap(self, handle: Handle) -> Handle:
        """Wrap `handle`, which is outside of all routes and checks."""

        async def logged(request: web.BaseRequest) -> web.StreamResponse:
            begin_s = time.monotonic()
            client = client_address(request.transport)
            response: web.StreamResponse | None = None
            try:
                response = await handle(request)
                return response
            finally:
                self._add(request, response, client, time.monotonic() - begin_s)

        return logged

    def _add(self, request: web.BaseRequest, response: web.StreamResponse | None, client: str, total_s: float) -> None:
        is_gone = response is None or request.transport is None or request.transport.is_closing()
        error = None if response is None else response.get(ERROR)
        request_id = request.get(REQUEST_ID) or request_ids.to_repeat(request.headers)
        if request_id is None and response is not None:
            request_id = id_in_headers(request, response)
        details = request.get(DETAILS)
        fields = {} if details is None else details.fields()
        if error is not None:
            fields["error"] = error.code or error.message
        self.add(
            current_scope(),
            client=client,
            method=request.method,
            path=request.rel_url.raw_path,
            status=CLIENT_LEFT if response is None or (is_gone and not response.prepared) else response.status,
            request_id=request_id or "",
            total_s=total_s,
            **fields,
        )

    def add(self, scope: str, **fields: Any) -> None:
        """Write a line with the fields of `Entry`, for a client with an API key of this scope."""
        for name, value in fields.items():
            if isinstance(value, float):
                fields[name] = round(value, 4)
            elif isinstance(value, str):
                fields[name] = truncated(value)
        entry = Entry(key=self._name_of(scope), **fields)
        ts = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
        line = self._json(ts, entry) if self._is_json else _text(ts, entry)
        self.writer.write(f"{line}\n".encode())

    def _json(self, ts: str, entry: Entry) -> str:
        try:
            text = self._encoder.encode(entry).decode()
        except UnicodeEncodeError:  # lone surrogates: bytes of the client that are not UTF-8
            values = msgspec.structs.asdict(entry)
            plain = {name: printable(value) for name, value in values.items() if isinstance(value, str)}
            text = self._encoder.encode(msgspec.structs.replace(entry, **plain)).decode()
        return json_printable(f'{{"ts":"{ts}",{text[1:]}')


def _text(ts: str, entry: Entry) -> str:
    """`2026-01-31T10:31:07.120Z 127.0.0.1 alice POST /v1/completions 200 total_s=0.093 …`"""
    head = (entry.client, entry.key, entry.method, entry.path, str(entry.status))
    rest = {
        name: value
        for name, value in msgspec.structs.asdict(entry).items()
        if value not in ("", None) and name not in ("client", "key", "method", "path", "status")
    }
    return " ".join([ts, *map(_plain, head), *(f"{name}={_plain(str(value))}" for name, value in rest.items())])


def _plain(text: str) -> str:
    """A text without spaces, so that each part of a line is one word."""
    return printable(text).replace(" ", "\\x20") or "-"
