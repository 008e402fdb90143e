"""Prompts that wait for a turn of ingest.

Fairly, by whose they are; but a suspect, which ingest had in work among others when it died, has its turn first, and
alone: when nothing else is in work, and until it is done. If it kills ingest again, no other request is suspected.

What waits for a thread, or for the check of its grammar in another process, is not in work: no one waits for that.
"""

from collections.abc import Container, Iterator

from pipeline.runtime.messages import Submit
from pipeline.runtime.queues.fair_queue import FairQueue
from pipeline.stages.ingest.prompts.prompt_cost import cost_bytes

MIN_BYTES = 1024
"""The least that a request costs in the queue."""

Key = tuple[int, int]
"""Request id and attempt."""


class SubmitQueue:
    """Owns the waiting prompts."""

    def __init__(self, crash_counts: Container[int] = ()) -> None:
        """`crash_counts` has the suspects, by request id."""
        self._suspect_ids = crash_counts
        self._others: FairQueue[Key, Submit] = FairQueue()
        self._suspects: dict[Key, Submit] = {}
        self._alone: Key | None = None
        """The suspect that is in work."""

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
    def holds(self) -> bool:
        """Whether nothing but a suspect may begin."""
        return bool(self._suspects) or self._alone is not None

    @property
    def may_pop(self) -> bool:
        """Whether a prompt that is not suspected has its turn now."""
        return not self.holds and len(self._others) > 0

    @property
    def may_pop_suspect(self) -> bool:
        """Whether a suspect has its turn as soon as nothing else is in work."""
        return bool(self._suspects) and self._alone is None

    def is_suspect(self, submit: Submit) -> bool:
        """Whether a process of ingest has crashed while it worked on this request."""
        return submit.request_id in self._suspect_ids

    def push(self, key: Key, submit: Submit) -> None:
        if self.is_suspect(submit):
            self._suspects[key] = submit
        else:
            self._others.push(key, submit, submit.scope_id, MIN_BYTES + cost_bytes(submit))

    def pop(self) -> tuple[Key, Submit]:
        """The prompt whose turn it is. Call it if `may_pop`."""
        turn = self._others.pop()
        assert turn is not None
        return turn[0], turn[1]

    def pop_suspect(self) -> tuple[Key, Submit]:
        """The next suspect, which is in work alone until it is `done`. Call it if `may_pop_suspect` and nothing is in
        work."""
        self._alone = key = next(iter(self._suspects))
        return key, self._suspects.pop(key)

    def done(self, key: Key) -> None:
        """A prompt is not in work any more, if it was."""
        if key == self._alone:
            self._alone = None

    def remove(self, key: Key) -> Submit | None:
        """Take a prompt out without a turn; None if it does not wait."""
        return self._suspects.pop(key, None) or self._others.remove(key)
