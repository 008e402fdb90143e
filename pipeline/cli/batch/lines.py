"""The lines of a batch file, in the form of OpenAI's Batch API."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from pipeline.errors import UserError

MAX_LINE_BYTES = 64 * 1024**2
METHOD = "POST"


class BatchLine(msgspec.Struct):
    """One request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    """The client's name for it, which no other line has."""
    url: Annotated[str, Meta(pattern="^/[!-~]*$")]
    """The path of the route, such as /v1/chat/completions"""
    body: Raw
    method: str = METHOD


class _Streamed(msgspec.Struct):
    stream: bool | None = None


_decoder = msgspec.json.Decoder(BatchLine)
_bodies = msgspec.json.Decoder(_Streamed)


def read_lines(data: Iterable[bytes], where: str) -> Iterator[BatchLine]:
    """The requests of a file; empty lines are left out. Raises UserError, which names the first wrong line."""
    seen: dict[str, int] = {}
    for number, raw in enumerate(data, 1):
        if not raw.strip():
            continue
        try:
            line = _decoded(raw)
        except ValueError as error:
            raise UserError(f"{where}, line {number}: {error}") from None
        if (first := seen.setdefault(line.custom_id, number)) != number:
            raise UserError(f"{where}, line {number}: line {first} has the custom_id {line.custom_id!r}, too")
        yield line


def _decoded(raw: bytes) -> BatchLine:
    """Raises ValueError."""
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, and the most are {MAX_LINE_BYTES}")
    try:
        line = _decoder.decode(raw)
        streamed = _bodies.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        needed = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise ValueError(f"{error}; a line is such as {needed}") from None
    if line.method != METHOD:
        raise ValueError(f"'method' must be {METHOD}, not {line.method!r}")
    if streamed.stream:
        raise ValueError("'body.stream' must be false: each reply is written as a whole")
    return line


def input_lines(path: Path) -> list[BatchLine]:
    """All requests of a file, or of standard input. Raises UserError."""
    import sys

    if str(path) == "-":
        return list(read_lines(sys.stdin.buffer, "standard input"))
    try:
        with path.open("rb") as file:
            return list(read_lines(file, str(path)))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
