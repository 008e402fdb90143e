"""Prompts that wait for a turn of ingest.

Fairly, by whose they are; but a suspect, which ingest had in work among others when it died, has its turn first, and
alone: when nothing else is in work, and until it is done. If it kills ingest again, no other request is suspected.
"""

from collections.abc import Iterator

from pipeline.runtime.fair_queue import FairQueue
from pipeline.runtime.messages import Submit
from pipeline.stages.ingest.prompt_processor import cost_chars

MIN_CHARS = 1024
"""The least that a request costs in the queue."""

Key = tuple[int, int]
"""Request id and attempt."""


class SubmitQueue:
    """Owns the waiting prompts."""

    def __init__(self) -> None:
        self._others: FairQueue[Key, Submit] = FairQueue()
        self._suspects: dict[Key, Submit] = {}

    def __len__(self) -> int:
        return len(self._others) + len(self._suspects)

    def __contains__(self, key: object) -> bool:
        return key in self._others or key in self._suspects

    def __iter__(self) -> Iterator[Key]:
        yield from self._suspects
        yield from self._others

    def __getitem__(self, key: Key) -> Submit:
        return self._suspects[key] if key in self._suspects else self._others[key]

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def push(self, key: Key, submit: Submit) -> None:
        if submit.is_suspect:
            self._suspects[key] = submit
        else:
            self._others.push(key, submit, submit.scope_id, MIN_CHARS + cost_chars(submit))

    def may_pop(self, in_work: Submit | None) -> bool:
        """Whether a prompt has its turn now. `in_work` is one of those that are in work, or None."""
        if in_work is not None and (self._suspects or in_work.is_suspect):
            return False
        return len(self) > 0

    def pop(self) -> tuple[Key, Submit]:
        """The prompt whose turn it is. Call it if `may_pop`."""
        if self._suspects:
            key = next(iter(self._suspects))
            return key, self._suspects.pop(key)
        turn = self._others.pop()
        assert turn is not None
        return turn[0], turn[1]

    def remove(self, key: Key) -> Submit | None:
        """Take a prompt out without a turn; None if it does not wait."""
        return self._suspects.pop(key, None) or self._others.remove(key)
