"""Whether the gateway takes requests, and whether the supervisor lives."""

import time
from collections.abc import Callable
from http import HTTPStatus

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError

LIVE_S = 10.0
"""The supervisor sends a ping to each stage every second. If none has come for this long, it does not run."""


class NotReady(ApiError):
    """503: new requests are refused."""


class Readiness:
    """Starting, ok, draining or failed; new requests are refused unless it is ok."""

    def __init__(self, model: str = "", server_ends: Callable[[], bool] = lambda: True) -> None:
        """`model` is the name of one of several, which ends alone unless `server_ends`."""
        self._model, self._server_ends = model, server_ends
        self.pinged_s = time.monotonic()
        """When the last ping of the supervisor came, by time.monotonic(); at first the time of creation."""
        self.facts: m.ExecuteFacts | None = None
        """From `Start`; None before it."""
        self.is_draining = False
        self.is_leaving = False
        """Other gateways go on serving: connections are closed after their next response."""
        self.failure: str | None = None
        """Which stage died, and why."""

    @property
    def status(self) -> str:
        if self.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "starting" if self.facts is None else "ok"

    @property
    def ends_alone(self) -> bool:
        """Whether its end is not that of the server."""
        return bool(self._model) and not self._server_ends()

    def require_live(self) -> None:
        """Raises ApiError, 503, if the supervisor does not run: restarts and shutdowns don't happen then."""
        if self.facts is not None and (silent_s := time.monotonic() - self.pinged_s) > LIVE_S:
            message = f"the supervisor has sent nothing for {silent_s:.0f} s"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="stage_unresponsive")

    def require_ready(self) -> m.ExecuteFacts:
        """Return what is known about the model. Raises NotReady if new requests are refused."""
        if self.failure is None and not self.is_draining and self.facts is not None:
            return self.facts
        message = {
            "failed": f"the server is shutting down: {self.failure}",
            "draining": "the server is shutting down and takes no new requests",
            "starting": "the server is starting",
        }
        if self.ends_alone:
            message = {
                "failed": f"the model '{self._model}' has failed: {self.failure}",
                "draining": f"the model '{self._model}' is being unloaded: send the request again, which loads it",
                "starting": f"the model '{self._model}' is starting",
            }
        raise NotReady(HTTPStatus.SERVICE_UNAVAILABLE, message[self.status], code=self.status)
