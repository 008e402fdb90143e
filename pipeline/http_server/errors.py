"""Errors as clients see them. Each API has its own shape of them (apis/)."""

from http import HTTPStatus

from pipeline.runtime.log.printable import printable

RETRY_AFTER_S = 1
"""Retry-After of a 503 without an estimate."""
MAX_SHOWN_CHARS = 200
"""Longest client text that an error repeats."""
_LINE_ENDS = "\n\t"


def truncated(text: str) -> str:
    """The beginning of client text."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def shown(text: str) -> str:
    """Client text for an error message: truncated, and without characters that are not printable."""
    return printable(truncated(text))


class ApiError(Exception):
    """An error reply. `param` is the path of the invalid field, such as `messages[0].content`.

    Its texts may repeat what a client has sent. aiohttp decodes bytes that are not UTF-8 to lone surrogates, which no
    reply could have. So here, once for every shape of an error, what is not printable becomes an escape.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        message = _encodable(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else _encodable(param)
        self.code = code
        self.retry_after_s = retry_after_s if status == HTTPStatus.SERVICE_UNAVAILABLE else None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    @property
    def text(self) -> str:
        """The message, for shapes without `param`: it names the field."""
        is_named = self.param is None or f"'{self.param}" in self.message
        return self.message if is_named else f"{self.param}: {self.message}"

    @property
    def kind(self) -> str:
        """OpenAI's `type` of an error."""
        return "invalid_request_error" if self.status < 500 else "server_error"


def _encodable(text: str) -> str:
    """A text that every reply can have. Messages may have several lines."""
    return printable(text, keep=_LINE_ENDS, most=len(text))


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 for an invalid field."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


class Overloaded(ApiError):
    """503. `by_size`: what is open has too many tokens or bytes, not too many requests."""

    def __init__(self, message: str, retry_after_s: int, *, by_size: bool) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code="overloaded", retry_after_s=retry_after_s)
        self.by_size = by_size


def overloaded(why: str, retry_after_s: int = RETRY_AFTER_S, *, by_size: bool = False) -> Overloaded:
    """503; `by_size` as in `Overloaded`"""
    message = f"the server is overloaded: {why}; try again in {retry_after_s} s"  # for users who don't see the header
    return Overloaded(message, retry_after_s, by_size=by_size)


ENCODINGS = ("identity", "gzip", "deflate")
"""Supported values of Content-Encoding."""


def timeout_error(timeout_s: float, *, has_dropped_output: bool = False) -> ApiError:
    """The error of a request whose deadline has passed, 504. `has_dropped_output`: it had output, which a preemption
    has dropped."""
    when = "while it waited to generate its output again" if has_dropped_output else "before its first token"
    message = f"the request timed out after {timeout_s:g} s, {when}"
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="timeout")


def unsupported_encoding(encoding: str) -> ApiError:
    """415"""
    what = f"the Content-Encoding '{shown(encoding)}'" if encoding else "this Content-Encoding"
    message = f"{what} is not supported: use {', '.join(ENCODINGS)}"
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_encoding")


def unsupported(param: str, what: str = "") -> ApiError:
    """400 for a field of the OpenAI API that this server does not support: it is never silently ignored."""
    return invalid(param, f"'{param}' is not supported by this server{': ' + what if what else ''}", "unsupported")
