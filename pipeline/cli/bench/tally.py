"""Reads one streamed reply as cheaply as possible: the client shares its cores with the measured server."""

from typing import Any

import orjson

CONTENT_KEYS = {"chat": b'"content":', "completions": b'"text":'}
QUOTE, SPACE = ord('"'), ord(" ")
BAD_FINISHES = ("error", "abort")


class Tally:
    """The server-sent events of one reply. Times are in seconds of one monotonic clock.

    Events with text are only searched and counted. JSON is decoded only for the others and the last one.
    """

    def __init__(self, endpoint: str) -> None:
        self.arrivals: list[float] = []
        """Arrival time of each chunk of text."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.has_usage = False
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._key = CONTENT_KEYS[endpoint]
        self._done = False
        self._rest = b""
        self._last_text = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Add bytes of the body, split anywhere, with their arrival time."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            self._event(data, start, end, now_s)
            start = end + 2
        self._rest = data[start:]

    def end(self, now_s: float) -> None:
        """The body has ended. Sets `error` if it ended before the reply did."""
        if self._last_text and not (self.finish_reason and self.has_usage):
            self._decode(self._last_text)
        if self.error is None and self.finish_reason in BAD_FINISHES:
            self.error = f"finish_reason {self.finish_reason}"
        if self.error is None and not self._done and self.finish_reason is None:
            self.error = "the stream ended early"
        if self.error is None and not self.arrivals and self.completion_tokens:
            self.arrivals.append(now_s)  # tokens without text, such as a lone end-of-sequence token
        if not self.has_usage:
            self.completion_tokens = len(self.arrivals)

    def _event(self, data: bytes, start: int, end: int, now_s: float) -> None:
        if not data.startswith(b"data:", start):
            return
        key = data.find(self._key, start, end)
        if key >= 0:
            value = key + len(self._key)
            if data[value] == SPACE:
                value += 1
            if data[value] == QUOTE and data[value + 1] != QUOTE:
                self.arrivals.append(now_s)
                self._last_text = data[start + 5 : end]
                return
        payload = data[start + 5 : end].strip()
        if payload == b"[DONE]":
            self._done = True
        else:
            self._decode(payload)

    def _decode(self, payload: bytes) -> None:
        try:
            event: Any = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = f"not JSON: {payload[:100].decode('utf-8', 'replace')}"
            return
        if not isinstance(event, dict):
            self.error = f"not an object: {payload[:100].decode('utf-8', 'replace')}"
            return
        if event.get("error") is not None:
            self.error = error_text(event)
        if usage := event.get("usage"):
            self.has_usage = True
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.completion_tokens = usage.get("completion_tokens") or 0
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def error_text(body: Any) -> str:
    """The message of an error, in OpenAI's shape or another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
