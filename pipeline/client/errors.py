"""The errors of a client of a running server."""


def is_busy(code: str | None, retry_after_s: int | None) -> bool:
    """Whether the same request may succeed later. A prompt that is larger than its key's tokens of a minute never
    does, and then the server does not say when."""
    return code in ("overloaded", "starting") or (code == "rate_limit_exceeded" and retry_after_s is not None)


class RequestError(Exception):
    """The server refused a request, or failed to finish it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.message = message
        self.param = param
        """The field that caused it."""
        self.code = code
        self.retry_after_s = retry_after_s
        """At status 429 and 503: retry after this many seconds."""

    def __str__(self) -> str:
        return f"{self.message} (status {self.status})"


class RequestTooLarge(ValueError):
    """The request is larger than the server accepts. It was not sent."""


class ConnectionLost(ConnectionError):
    """The server has ended or does not answer. Open requests can be resumed elsewhere with the ids received so far."""


class ForeignServer(ConnectionLost):
    """A process of another user listens on this Unix socket. Nothing was sent to it."""
