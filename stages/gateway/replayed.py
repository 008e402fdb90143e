"""Replays the clients of a recorded gateway.

A recording has what each client sent, which is parsed again, and when the parts of its response were written.
Connections and their bytes are not recorded.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import msgspec

from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.security.api_keys import NO_SCOPE
from pipeline.stages.gateway.admin.abort_requests import AbortEvent, RequestAborter
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.admission.preemption import PREEMPT, RESUME, TOO_LARGE, Preemption
from pipeline.stages.gateway.dialect import ReplyEvents
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.received import Received, parse_again
from pipeline.stages.gateway.replies.resume_points import Continuation

SHUTTING_DOWN = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", code="shutting_down")
LEAVING = ApiError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this gateway is shutting down (gateway.replicas was lowered): connect again",
    code="shutting_down",
)
REPLACED = ApiError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this server was replaced by another one at its address (pipeline restart): send the request again",
    code="shutting_down",
)
UNLOADED = ApiError(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the model was unloaded before it had finished this request: send the request again, which loads it",
    code="shutting_down",
)
ENDS = {b"": SHUTTING_DOWN, b"leaving": LEAVING, b"replaced": REPLACED, b"unloaded": UNLOADED}
"""Errors of requests that are open at the end of a drain, by their names in recordings."""


class ReplayedClients:
    """Repeats what clients did, at the recorded moments."""

    def __init__(
        self,
        replay_context: ReplayContext,
        requests: RequestTable,
        aborter: RequestAborter,
        resetter: PrefixCacheResetter,
        preemption: Preemption,
        limits: RequestLimits,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._aborter = aborter
        self._decoder = msgspec.json.Decoder(Received)
        self._open_requests: dict[int, tuple[Request, ReplyEvents | None]] = {}
        """By number, with the events of those that are streamed."""
        replay_context.perform("open", self._open)
        replay_context.perform("refused", self._refuse)
        replay_context.perform("leave", self._release)
        replay_context.perform("abort", self._abort)
        replay_context.perform("stop", self._stop)
        replay_context.perform("timeout", self._expire)
        replay_context.perform("late", self._fail_late)
        replay_context.perform(PREEMPT, partial(self._move, preemption.preempt))
        replay_context.perform(RESUME, partial(self._move, preemption.resume))
        replay_context.perform(TOO_LARGE, partial(self._fail, preemption))
        replay_context.perform("reset", lambda *_: self._reset(resetter))
        replay_context.perform("fail all", lambda _, data: requests.fail_all(ENDS[data], data))
        self._continuations: dict[int, Continuation] = {}
        replay_context.perform("rewind", self._rewind)
        replay_context.perform("rewound", lambda number, _: self._continuations.pop(number).end())
        for what in ("first", "due", "last", "whole"):
            replay_context.perform(what, partial(self._give, what))

    def _open(self, number: int, data: bytes) -> None:
        self._requests.num_opened = number - 1
        try:
            request = self._requests.open(parse_again(self._decoder.decode(data), self._limits), None)
        except ApiError:
            return  # a queue was full for one of its prompts
        self._open_requests[number] = request, request.parsed.dialect.events(request) if request.parsed.stream else None

    def _refuse(self, number: int, _: bytes) -> None:
        """Its client got 503 or 400, and no stage heard of it."""
        self._requests.num_opened = number

    def _move(self, move: Callable[[PromptRequest], None], number: int, index: bytes) -> None:
        """Preempt or resume one of the prompts of a request."""
        if number in self._open_requests:
            move(self._open_requests[number][0].prompt_requests[int(index)])

    def _fail(self, preemption: Preemption, number: int, message: bytes) -> None:
        if number in self._open_requests:
            preemption.fail(self._open_requests[number][0], message.decode())

    def _rewind(self, number: int, _: bytes) -> None:
        self._continuations[number] = continuation = Continuation(self._open_requests[number][0])
        continuation.begin()

    def _abort(self, _: int, data: bytes) -> None:
        event = msgspec.msgpack.decode(data, type=AbortEvent | list[str])
        if isinstance(event, list):  # a recording from before scopes
            event = AbortEvent(event, NO_SCOPE)
        self._aborter.begin(event.names, event.scope, ends_reasoning=event.ends_reasoning)

    def _stop(self, number: int, _: bytes) -> None:
        if number in self._open_requests:
            self._requests.stop(self._open_requests[number][0])

    def _expire(self, number: int, _: bytes) -> None:
        if number in self._open_requests:
            self._requests.expire(self._open_requests[number][0])

    def _fail_late(self, number: int, data: bytes) -> None:
        if number in self._open_requests:
            error = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, data.decode(), code="stage_unresponsive")
            self._open_requests[number][0].fail(error)

    def _reset(self, resetter: PrefixCacheResetter) -> None:
        with contextlib.suppress(ApiError):  # as in the recording
            resetter.begin()

    def _release(self, number: int, _: bytes) -> None:
        if number in self._open_requests:  # else not all its prompts could be sent
            request, _events = self._open_requests.pop(number)
            self._requests.release(request)

    def _give(self, what: str, number: int, _: bytes) -> None:
        request, events = self._open_requests[number]
        if what == "whole":
            request.log_output("whole", request.parsed.dialect.whole(request))
            return
        assert events is not None
        match what:
            case "first":
                events.first()
            case "due":
                events.due()
            case "last":
                events.last()
