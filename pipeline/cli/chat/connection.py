"""One answer as it comes: a streamed chat completion of a server that speaks the OpenAI API."""

from collections.abc import AsyncIterator, Iterator, Sequence
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from pipeline.cli.bench.client import MAX_SHOWN_BYTES, base_of, message_of, reason_of
from pipeline.cli.bench.tally import error_text
from pipeline.cli.chat.conversation import Turn

CONNECT_S = 10.0
MAX_EVENT_BYTES = 4 * 1024**2
"""Of one event: a stream without line ends is none, and is not to fill the memory."""
GOING_CODES = ("stage_died", "failed", "draining", "shutting_down")
"""What our own servers say when they end."""


class AnswerError(Exception):
    """There is no answer, or no more of it, in the user's words."""

    def __init__(self, message: str, *, code: str | None = None, is_gone: bool = False) -> None:
        super().__init__(message)
        self.code = code
        """The server's word for it, as `context_length_exceeded`."""
        self.is_gone = is_gone or code in GOING_CODES
        """Whether the server could not be reached, broke off, or is going down."""


class ChatAnswer(msgspec.Struct):
    """What is known of an answer, while it comes and afterwards. Times are in seconds of `perf_counter`."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    """When its first and last text came."""
    num_chunks: int = 0
    num_tokens: int | None = None
    """As the server counts; None where it doesn't say."""
    finish_reason: str | None = None


class ChatConnection:
    """A model of a server. To be made inside a running event loop, and closed in it."""

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s` is the longest that the server may be silent."""
        self._base = base_of(url)
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # Minutes may pass between two questions, in which the server may have closed what was left open.
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s),
        )

    async def close(self) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The model that the server lists first, which is asked from now on. Raises AnswerError."""
        url = f"{self._base}/models"
        try:
            async with self._session.get(url) as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"{url} can't be reached: {reason_of(error)}", is_gone=True) from error
        if response.status != 200:
            raise AnswerError(f"{url} answers {response.status}: {message_of(body)}")
        match _json(body):
            case {"data": [{"id": str() as model}, *_]}:
                self.model = model
                return model
        raise AnswerError(f"{url} lists no model; name one with --model")

    async def stream(self, turns: Sequence[Turn], options: dict[str, Any], answer: ChatAnswer) -> AsyncIterator[str]:
        """The text of an answer, piece by piece; `answer` is kept up to date. Raises AnswerError.

        Leaving it early closes the connection, which has the server stop.
        """
        body = {"model": self.model, "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
        events = _Events()
        try:
            async with self._session.post(
                f"{self._base}/chat/completions",
                data=msgspec.json.encode(body | options),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                if response.content_type != "text/event-stream":
                    raise AnswerError(f"the server answers with {response.content_type} and not with a stream")
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        if text := _take(event, answer):
                            yield text
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AnswerError(f"the server is gone: {reason_of(error)}", is_gone=True) from error
        if answer.finish_reason is None:
            raise AnswerError("the server is gone: the stream ended before the answer did", is_gone=True)


class _Events:
    """Splits a stream of bytes into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is whole now. Raises AnswerError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise AnswerError("the server sends a stream without line ends")
        for line in lines:  # servers of this API write each event's data on one line
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(data: bytes, answer: ChatAnswer) -> str:
    """Read one event into the answer, and return its text."""
    if data == b"[DONE]" or not data:
        return ""
    event = _json(data)
    if not isinstance(event, dict):
        raise AnswerError(f"the server sends what is no event: {data[:MAX_SHOWN_BYTES].decode('utf-8', 'replace')}")
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
    return AnswerError(f"the server answers {status}: {message_of(body)}", code=code if isinstance(code, str) else None)


def _json(data: bytes) -> Any:
    """What the bytes hold, or None where they are no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
