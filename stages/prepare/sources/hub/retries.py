"""When a request to the hub is worth another try, and after how long."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

# Depending on its version, huggingface_hub is built on requests or httpx; the base classes of its HTTPError are the
# roots of either family.
TRANSPORT: tuple[type[Exception], ...] = (
    *(base for base in HfHubHTTPError.__mro__ if base.__name__ in ("HTTPError", "RequestException")),
    ConnectionError,
    TimeoutError,
)
"""Errors of connections; HfHubHTTPError, a reply with an error's status, is one of them."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of errors that may be over after a while."""
MAX_TRIES = 5
"""Without anything received between them."""
BACKOFF_S = 1.0
MAX_WAIT_S = 300.0
"""The longest pause that a server may ask for, and of all pauses together without anything received."""
_USER, _QUERY = re.compile(r"(://)[^/@\s]+@"), re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_RESET = re.compile(r"\bt=(\d+)")
"""In `RateLimit: "api";r=0;t=55`: the limit's window ends in 55 s."""


class Retries:
    """Counts the tries of one request. `stop` ends a pause."""

    def __init__(self, what: str, say: Callable[[str], None], stop: threading.Event | None = None) -> None:
        self._what, self._say = what, say
        self._stop = stop or threading.Event()
        self._waited_s = 0.0
        self.num_tries = 0

    def wait_after(self, error: Exception, *, has_progress: bool = False) -> None:
        """Pause after an error. Raises it if another try can't help, or after too many."""
        status = status_of(error)
        if status is not None and status not in PASSING:
            raise error
        if has_progress:
            self.num_tries, self._waited_s = 0, 0.0
        self.num_tries += 1
        asked_s = asked_wait_s(error)
        wait_s = BACKOFF_S * 2 ** (self.num_tries - 1) if asked_s is None else asked_s
        self._waited_s += wait_s
        if self.num_tries >= MAX_TRIES or self._waited_s > MAX_WAIT_S:
            raise error
        why = f"status {status}" if status is not None else first_line(error)
        self._say(f"{self._what}: {why}; trying again in {wait_s:.0f} s")
        self._stop.wait(wait_s)


def patiently(what: str, say: Callable[[str], None], call: Callable[[], T]) -> T:
    """The result of `call`, which is made again if the server asks for it. Raises its last error."""
    retries = Retries(what, say)
    while True:
        try:
            return call()
        except HfHubHTTPError as error:
            retries.wait_after(error)


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error's reply; None if it had none."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def asked_wait_s(error: Exception) -> float | None:
    """The pause that the server's reply asks for; None if it names none."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    after = str(headers.get("Retry-After", "")).strip()
    if after.isdecimal():
        return float(after)
    with suppress(ValueError, TypeError):  # no date, or none of a time zone
        return max(0.0, (parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds())
    reset = _RESET.search(str(headers.get("RateLimit", ""))) if status_of(error) == 429 else None
    return float(reset[1]) if reset else None


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_secrets(lines[0] if lines else type(error).__name__)[:200]


def without_secrets(text: str) -> str:
    """A text without what its addresses may have for their owner only: names, passwords, and signatures in queries."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1***@", text))
