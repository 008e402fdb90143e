"""Streamed chat completions from a server with the OpenAI API."""

from collections.abc import AsyncIterator, Iterator, Sequence
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from pipeline.cli.bench.client import MAX_SHOWN_BYTES, base_of, no_connection, reason_of, refusal_of, unanswered
from pipeline.cli.bench.tally import error_text
from pipeline.cli.chat.conversation import Turn

CONNECT_S = 10.0
MAX_EVENT_BYTES = 4 * 1024**2
"""Largest event. A stream without line ends must not fill the memory."""
GOING_CODES = ("stage_died", "failed", "draining", "shutting_down")
"""Error codes of our own servers that are shutting down."""


class AnswerError(Exception):
    """The request failed, or its stream broke off. The message is for the user."""

    def __init__(self, message: str, *, code: str | None = None, is_gone: bool = False) -> None:
        super().__init__(message)
        self.code = code
        """The server's error code, such as `context_length_exceeded`."""
        self.is_gone = is_gone or code in GOING_CODES
        """Whether the server is unreachable, has closed the connection, or is shutting down."""


class ChatAnswer(msgspec.Struct):
    """The state of a reply, updated while it streams. Times are in seconds of `perf_counter`."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    """Arrival of the first and the last text."""
    num_chunks: int = 0
    num_tokens: int | None = None
    """Tokens counted by the server; None if it reports no usage."""
    finish_reason: str | None = None


class ChatConnection:
    """A connection to one model of a server. Create and close it inside a running event loop."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s` is the longest time without data from the server."""
        self._base = base_of(url)
        self.model = model
        self.recommended: dict[str, Any] | None = None
        """The sampling options that the model recommends; None if the server doesn't list them."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # Minutes may pass between two questions, and the server may close an idle connection.
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s),
        )

    async def close(self) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """Use the first model that the server lists, of several the first one that generates text. Raises
        AnswerError."""
        url = f"{self._base}/models"
        try:
            async with self._session.get(url) as response:
                body = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise AnswerError(no_connection(self._base, error), is_gone=True) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"{url} {unanswered(self._base, error)}", is_gone=True) from error
        if response.status != 200:
            raise AnswerError(f"{url} answered {response.status}: {refusal_of(response.status, body)}")
        match _json(body):
            case {"data": [{"id": str()}, *_] as cards}:
                card = next((one for one in cards if "generate" in one.get("tasks", ())), cards[0])
                self.model = model = str(card["id"])
                recommended = card.get("default_sampling_params")
                self.recommended = recommended if isinstance(recommended, dict) else None
                return model
        raise AnswerError(f"{url} lists no model; name one with --model")

    async def stream(self, turns: Sequence[Turn], options: dict[str, Any], answer: ChatAnswer) -> AsyncIterator[str]:
        """Yield the text of a reply, piece by piece, and update `answer`. Raises AnswerError. Closing the generator
        early closes the connection, and the server aborts the request."""
        body = {"model": self.model, "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
        events = _EventParser()
        try:
            async with self._session.post(
                f"{self._base}/chat/completions",
                data=msgspec.json.encode(body | options),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                if response.content_type != "text/event-stream":
                    raise AnswerError(f"the server answered with {response.content_type} instead of a stream")
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        if text := _take(event, answer):
                            yield text
        except aiohttp.ClientConnectorError as error:
            raise AnswerError(no_connection(self._base, error), is_gone=True) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"lost the connection to the server: {reason_of(error)}", is_gone=True) from error
        if answer.finish_reason is None:
            raise AnswerError("lost the connection to the server: the stream ended early", is_gone=True)


class _EventParser:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is now complete. Raises AnswerError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise AnswerError("the server sent a stream without line ends")
        for line in lines:  # servers with this API write each event's data on one line
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(data: bytes, answer: ChatAnswer) -> str:
    """Add one event to the answer. Returns its text."""
    if data == b"[DONE]" or not data:
        return ""
    event = _json(data)
    if not isinstance(event, dict):
        raise AnswerError(f"the server sent an invalid event: {data[:MAX_SHOWN_BYTES].decode('utf-8', 'replace')}")
    if event.get("error") is not None:
        error = event["error"]
        raise AnswerError(error_text(event), code=error.get("code") if isinstance(error, dict) else None)
    text = ""
    match event:
        case {"usage": {"completion_tokens": int() as num_tokens}}:
            answer.num_tokens = num_tokens
    match event:
        case {"choices": [{"delta": {"content": str() as text}}, *_]} if text:
            answer.last_s = perf_counter()
            answer.first_s = answer.first_s or answer.last_s
            answer.num_chunks += 1
    match event:
        case {"choices": [{"finish_reason": str() as reason}, *_]}:
            answer.finish_reason = reason
    return text


def _refusal(status: int, body: bytes) -> AnswerError:
    parsed = _json(body)
    code = None
    if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
        code = parsed["error"].get("code")
    return AnswerError(
        f"the server answered {status}: {refusal_of(status, body)}", code=code if isinstance(code, str) else None
    )


def _json(data: bytes) -> Any:
    """The decoded JSON; None if the bytes are not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
