"""The clients of a gateway that is replayed: what they asked, and when they were written to, is in the recording.

A recording of the gateway begins behind HTTP: with a call as it was parsed, and with the events of its stream as they
were made. Connections and their bytes are not in it.
"""

import contextlib
from functools import partial
from http import HTTPStatus

import msgspec

from pipeline.runtime.api_keys import NO_SCOPE
from pipeline.runtime.replay_context import ReplayContext
from pipeline.stages.gateway.admin.aborts import AbortDesk, AbortEvent
from pipeline.stages.gateway.admin.prefix_cache_resets import ResetDesk
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parse import Ask
from pipeline.stages.gateway.replies import shapes
from pipeline.stages.gateway.requests import Call, Requests

SHUTTING_DOWN = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", code="shutting_down")


class ReplayedClients:
    """Does what clients did, when the tape comes to it."""

    def __init__(self, replay_context: ReplayContext, requests: Requests, aborts: AbortDesk, resets: ResetDesk) -> None:
        self._requests = requests
        self._aborts = aborts
        self._decoder = msgspec.msgpack.Decoder(Ask)
        self._calls: dict[int, tuple[Call, shapes.Events]] = {}
        replay_context.perform("open", self._open)
        replay_context.perform("leave", self._leave)
        replay_context.perform("abort", self._abort)
        replay_context.perform("timeout", self._expire)
        replay_context.perform("reset", lambda *_: self._reset(resets))
        replay_context.perform("fail all", lambda *_: requests.fail_all(SHUTTING_DOWN))
        for what in ("first", "due", "last", "whole"):
            replay_context.perform(what, partial(self._give, what))

    def _open(self, number: int, data: bytes) -> None:
        self._requests.num_opened = number - 1
        try:
            call = self._requests.open(self._decoder.decode(data))
        except ApiError:
            return  # as it was then: it was overloaded
        self._calls[number] = call, shapes.events(call)

    def _abort(self, _: int, data: bytes) -> None:
        event = msgspec.msgpack.decode(data, type=AbortEvent | list[str])
        if isinstance(event, list):  # of before there were scopes
            event = AbortEvent(event, NO_SCOPE)
        self._aborts.begin(event.names, event.scope)

    def _expire(self, number: int, _: bytes) -> None:
        if number in self._calls:
            self._requests.expire(self._calls[number][0])

    def _reset(self, resets: ResetDesk) -> None:
        with contextlib.suppress(ApiError):  # as it was then
            resets.begin()

    def _leave(self, number: int, _: bytes) -> None:
        if number in self._calls:  # else it could not be opened whole
            call, _events = self._calls.pop(number)
            self._requests.leave(call)

    def _give(self, what: str, number: int, _: bytes) -> None:
        call, events = self._calls[number]
        match what:
            case "first":
                events.first()
            case "due":
                events.due()
            case "last":
                events.last()
            case "whole":
                shapes.told(call, shapes.body_of(call))
