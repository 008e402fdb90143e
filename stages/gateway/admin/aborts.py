"""POST /abort_requests: ends calls by their names, whichever gateway holds them.

    client ──► this gateway ──AbortRequests──► each other gateway
                   ▲                              │
                   └─────────RequestsAborted─────────┘     which of the names were open there

A client ends calls of its own scope alone, that is, those that were opened with the same API key. Names of other
clients' calls are answered like names that were never heard of.

The kernel deals connections out, so the gateway that is asked is often not the one that holds the stream. A gateway
that does not answer in time is left out of the count: what it was told it does all the same.
"""

import asyncio
import itertools
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.client.protocol import MAX_NAME_CHARS
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.errors import overloaded
from pipeline.stages.gateway.requests import Requests

ANSWER_S = 2.0
"""Longest that the other gateways may take to say what they had."""
MAX_NAMES = 1024
"""In one request."""

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS + len("chatcmpl-"))]


class AbortBody(msgspec.Struct):
    """POST /abort_requests"""

    request_ids: Annotated[list[Name], Meta(max_length=MAX_NAMES)]


class Aborted(msgspec.Struct):
    """What it answers: each id is counted once, however often it was named."""

    num_aborted: int
    num_unknown: int
    """Never heard of, or over already."""


class AbortEvent(msgspec.Struct):
    """What a recording has of it."""

    names: list[str]
    scope: str


class Question:
    """What the other gateways have still to answer."""

    def __init__(self, nonce: int, gateways: set[int]) -> None:
        self.nonce = nonce
        self.gateways = gateways
        self.places: set[int] = set()
        self.is_answered = asyncio.Event()


class AbortDesk:
    """Ends calls here and asks the other gateways to do the same."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", requests: Requests) -> None:
        self._stage = stage
        self._requests = requests
        self._others = [
            int(replica)
            for name, _, replica in (peer.name.partition(".") for peer in stage.launch.peers)
            if name == "gateway" and int(replica) != stage.replica
        ]
        self._nonces = itertools.count()
        self._questions: dict[int, Question] = {}

    async def abort(self, names: list[str], scope: str) -> Aborted:
        """End all calls of these names in a scope. Raises ApiError, 503, where another gateway takes no more
        messages."""
        names = list(dict.fromkeys(names))
        if self._stage.replay_context.is_recording:
            self._stage.replay_context.event("abort", 0, msgspec.msgpack.encode(AbortEvent(names, scope)))
        places, question = self.begin(names, scope)
        if question is not None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await question.is_answered.wait()
            except TimeoutError:
                late = sorted(question.gateways)
                self._stage.log.warning("gateways did not say what they aborted", extra={"fields": {"late": late}})
            finally:
                del self._questions[question.nonce]
            places |= question.places
        return Aborted(len(places), len(names) - len(places))

    def begin(self, names: list[str], scope: str) -> tuple[set[int], Question | None]:
        """End those calls that are here, and ask the other gateways. Raises ApiError as `abort`."""
        places = set(self._requests.call_off(names, scope))
        if not names or not self._others:
            return places, None
        nonce = next(self._nonces)
        for replica in self._others:
            message = m.AbortRequests(self._stage.replica, nonce, names, scope)
            if not self._stage.outbox("gateway", replica).send(message):
                raise overloaded("its gateways take no more messages")
        question = self._questions[nonce] = Question(nonce, set(self._others))
        return places, question

    def asked(self, message: m.AbortRequests) -> None:
        """Another gateway asks. What can't be answered now is counted there as unknown, and aborted all the same."""
        places = self._requests.call_off(message.names, message.scope)
        self._stage.outbox("gateway", message.gateway).send(
            m.RequestsAborted(self._stage.replica, message.nonce, places)
        )

    def answered(self, message: m.RequestsAborted) -> None:
        """Another gateway answers, perhaps too late."""
        if (question := self._questions.get(message.nonce)) is not None:
            question.places.update(message.places)
            question.gateways.discard(message.gateway)
            if not question.gateways:
                question.is_answered.set()
