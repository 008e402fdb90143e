"""Whether the gateway takes requests."""

from http import HTTPStatus

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError


class Readiness:
    """Starting, ok, draining or failed; new requests are refused unless it is ok."""

    def __init__(self) -> None:
        self.facts: m.ExecuteFacts | None = None
        """From `Start`; None before it."""
        self.is_draining = False
        self.failure: str | None = None
        """Which stage died, and why."""

    @property
    def status(self) -> str:
        if self.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "starting" if self.facts is None else "ok"

    def require_ready(self) -> m.ExecuteFacts:
        """Return what is known about the model. Raises ApiError, 503, if new requests are refused."""
        if self.failure is None and not self.is_draining and self.facts is not None:
            return self.facts
        message = {
            "failed": f"the server is shutting down: {self.failure}",
            "draining": "the server is shutting down and takes no new requests",
            "starting": "the server is starting",
        }[self.status]
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=self.status)
