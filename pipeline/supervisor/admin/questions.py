"""Control requests that stages have not answered yet."""

import time
from collections.abc import Callable, Iterable

import msgspec

from pipeline.runtime import messages as m

MAX_OPEN_QUESTIONS = 64

Answers = dict[str, m.Answer]
"""By stage. Stages that did not answer in time, or could not be reached, are missing."""


class _AdminQuestion(msgspec.Struct, eq=False):
    awaited: set[str]
    deadline: float
    then: Callable[[Answers], None]
    answers: Answers


class Questions:
    """Control requests that stages have not answered yet. `then` is called once for each, except after `close`."""

    def __init__(self, send: Callable[[str, m.ControlRequest], bool]) -> None:
        self._send = send
        self._open: dict[int, _AdminQuestion] = {}
        self._next_nonce = 1

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MAX_OPEN_QUESTIONS

    @property
    def deadlines(self) -> list[float]:
        """Times of time.monotonic()."""
        return [question.deadline for question in self._open.values()]

    def ask(
        self,
        stages: Iterable[str],
        request: m.ControlRequest,
        timeout_s: float,
        then: Callable[[Answers], None],
    ) -> None:
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        numbered = msgspec.structs.replace(request, nonce=nonce)
        awaited = {name for name in stages if self._send(name, numbered)}
        self._open[nonce] = _AdminQuestion(awaited, time.monotonic() + timeout_s, then, {})
        self._end_if_answered(nonce)

    def answered(self, stage: str, answer: m.Answer) -> None:
        """Handle an answer. Drop it if it is late or unknown."""
        question = self._open.get(answer.nonce)
        if question is not None and stage in question.awaited:
            question.awaited.discard(stage)
            question.answers[stage] = answer
            self._end_if_answered(answer.nonce)

    def lost(self, stage: str) -> None:
        """Stop waiting for a stage that has ended."""
        for nonce in list(self._open):
            self._open[nonce].awaited.discard(stage)
            self._end_if_answered(nonce)

    def end_late(self) -> None:
        """End the questions whose deadline has passed, with the answers received so far."""
        now = time.monotonic()
        for nonce, question in list(self._open.items()):
            if now >= question.deadline:
                del self._open[nonce]
                question.then(question.answers)

    def _end_if_answered(self, nonce: int) -> None:
        if not self._open[nonce].awaited:
            question = self._open.pop(nonce)
            question.then(question.answers)
