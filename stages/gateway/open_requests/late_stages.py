"""Refuses requests while a stage that they need is late, so that their clients don't wait in silence.

    LateStages ──gateway.late_stage_timeout_s after the stage was last known to run──► refused until it is back

At that moment, open requests that arrived since the stage fell silent and have no output yet fail too. Requests that
arrived earlier wait: the stage may be busy with them.

If this process did not run when the timeout passed, because all were suspended, the timeout begins again.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request

RETRY_AFTER_S = 5
_TIMER_SLACK_S = 0.01
"""The event loop's timers count in milliseconds, and may be early by one."""
_PROMPT_ONLY_STAGES = ("ingest",)
"""The stages behind the gateway that a request without output needs."""
_STAGES = (*_PROMPT_ONLY_STAGES, "schedule", "execute", "detokenize")


class LateStages:
    """The stages that are late now. Times are by time.monotonic(), which all processes share."""

    def __init__(self, timeout_s: float, overdue: Callable[[], None]) -> None:
        """`timeout_s` is gateway.late_stage_timeout_s; 0 refuses nothing. `overdue` is called from the event loop when
        the timeout of a stage passes."""
        self._timeout_s = timeout_s
        self._overdue = overdue
        self._since_s: dict[str, float] = {}
        """By process: when it was last known to run; later by the time in which all processes were suspended."""
        self._silent_since_s = float("inf")
        """When the first of them was last known to run."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        """When the timer is due."""
        self._waiting: set[str] = set()
        """Those whose timeout had not passed when the timer was set."""

    def update(self, message: m.LateStages) -> None:
        """Replace the stages that are late. Call it in the event loop."""
        self._since_s = {
            name: since_s
            for name, since_s in zip(message.names, message.since_s, strict=True)
            if _stage_of(name) in _STAGES and self._timeout_s
        }
        silent_since_s = message.silent_since_s or message.since_s
        self._silent_since_s = min(
            (silent_s for name, silent_s in zip(message.names, silent_since_s, strict=True) if name in self._since_s),
            default=float("inf"),
        )
        if self._timer is not None:
            self._timer.cancel()
        self._set_timer()

    def check(self, *, generates: bool) -> None:
        """Raises ApiError, 503, if a new request must wait for a late stage. `generates`: it needs the model."""
        if not self._since_s:
            return
        self._notice_suspension()
        needed = _STAGES if generates else _PROMPT_ONLY_STAGES
        now_s = time.monotonic()
        for name, since_s in self._since_s.items():
            if now_s - since_s >= self._timeout_s and _stage_of(name) in needed:
                message = f"stage {name} has not answered for {now_s - since_s:.0f} s: try again later"
                raise ApiError(
                    HTTPStatus.SERVICE_UNAVAILABLE, message, code="stage_unresponsive", retry_after_s=RETRY_AFTER_S
                )

    def error_of(self, request: Request) -> ApiError | None:
        """The error of an open request that has waited too long for a late stage; None if it may wait."""
        if request.has_begun or not self._since_s or request.received_s < self._silent_since_s:
            return None
        try:
            self.check(generates=not request.parsed.is_prompt_only)
        except ApiError as error:
            return error
        return None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer, self._due_s = None, float("inf")
        now_s, wait_s = time.monotonic(), self._timeout_s + _TIMER_SLACK_S
        due_s = {name: since_s + wait_s for name, since_s in self._since_s.items() if since_s + wait_s > now_s}
        self._waiting = set(due_s)
        if due_s:
            self._due_s = min(due_s.values())
            self._timer = asyncio.get_running_loop().call_later(self._due_s - now_s, self._pass)

    def _notice_suspension(self) -> bool:
        """Whether this process did not run when the timer was due. Then the stages get their timeout again."""
        if not suspension.missed(self._due_s):
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._since_s |= dict.fromkeys(self._waiting, time.monotonic())
        self._set_timer()
        return True

    def _pass(self) -> None:
        if not self._notice_suspension():
            self._set_timer()
            self._overdue()


def _stage_of(name: str) -> str:
    return name.partition(".")[0]
