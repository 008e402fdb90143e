"""Ends of requests that can't be served. Pure."""

from http import HTTPStatus


class RelayError(Exception):
    """The end of a request that can't be served."""

    def __init__(self, message: str, code: str, status: int = HTTPStatus.SERVICE_UNAVAILABLE) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status
