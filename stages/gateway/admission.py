"""What may be open at once: sequences, and prompt tokens. Pure.

    admit ──► take (an estimate) ──► correct (Accepted says how many) ──► give, when the request is settled

A call that is alone is let in whatever its length: else a prompt longer than the limit could never be served. Tokens
count once for a prompt, however many sequences it has; an estimate is a guess, so the sum may go above the limit by
what guesses were too low.
"""

import math
from collections import deque
from typing import NamedTuple

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import overloaded

ID_BYTES = 4
BYTES_PER_TOKEN = 4
"""Of text, as English has in most vocabularies."""
WINDOW_S = 30.0
"""How far back is looked to see how fast requests end."""
MAX_ENDS = 256
"""Ends that are remembered."""
MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""What a client is asked to wait, at least and at most."""


class _End(NamedTuple):
    at_s: float
    num_sequences: int
    num_tokens: int


class Admission:
    """Owns the counts of what is open at one gateway. Times are by time.monotonic()."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.max_prompt_tokens: int | None = None
        """Longest prompt that anything is computed from; None before that is known."""
        self.num_sequences = 0
        self.num_tokens = 0
        self._busy_since_s = 0.0
        self._ends: deque[_End] = deque(maxlen=MAX_ENDS)

    def check_room(self, now_s: float) -> None:
        """Before a body is read: raises ApiError, 503, where no request at all would be let in."""
        if self.num_sequences >= self.max_sequences:
            raise overloaded(
                f"all {self.max_sequences} sequences that may be open at once are", self._retry_after_s(1, 0, now_s)
            )
        if self.num_sequences and self.num_tokens >= self.max_tokens:
            raise overloaded(
                f"all {self.max_tokens} prompt tokens that may be open at once are", self._retry_after_s(0, 1, now_s)
            )

    def admit(self, num_sequences: int, num_tokens: int, now_s: float) -> None:
        """Raises ApiError, 503, where a call for so much may not be let in now."""
        num_left = self.max_sequences - self.num_sequences
        if num_sequences > num_left:
            raise overloaded(
                f"of the {self.max_sequences} sequences that may be open at once, {num_left} are left, and this "
                f"request opens {num_sequences}: n, or best_of, for each prompt",
                self._retry_after_s(num_sequences - num_left, 0, now_s),
            )
        num_left = max(0, self.max_tokens - self.num_tokens)
        if self.num_sequences and num_tokens > num_left:
            raise overloaded(
                f"of the {self.max_tokens} prompt tokens that may be open at once, {num_left} are left, and this "
                f"request has about {num_tokens}",
                self._retry_after_s(0, min(num_tokens - num_left, self.num_tokens), now_s),
            )

    def take(self, num_sequences: int, num_tokens: int, now_s: float) -> None:
        """A request is open."""
        if not self.num_sequences:
            self._busy_since_s = now_s
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens

    def correct(self, estimate: int, num_tokens: int) -> None:
        """An open request has so many tokens."""
        self.num_tokens += num_tokens - estimate

    def give(self, num_sequences: int, num_tokens: int, now_s: float) -> None:
        """A request is settled."""
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
        assert self.num_sequences >= 0 and self.num_tokens >= 0, "more was given back than taken"
        self._ends.append(_End(now_s, num_sequences, num_tokens))

    def estimate(self, prompt: m.Prompt, *, is_computed: bool) -> int:
        """Tokens of a prompt: exact where it is ids. `is_computed` says that it has to fit the model, or is refused."""
        match prompt:
            case m.IdsPrompt(ids):
                num_tokens = len(ids) // ID_BYTES if isinstance(ids, bytes) else ids.length // ID_BYTES
            case m.TextPrompt(text):
                num_tokens = _num_bytes(text) // BYTES_PER_TOKEN
            case m.ChatPrompt(messages):
                num_tokens = sum(_num_bytes(one.content or "") for one in messages) // BYTES_PER_TOKEN
        if is_computed and self.max_prompt_tokens is not None:
            num_tokens = min(num_tokens, self.max_prompt_tokens)
        return max(1, num_tokens)

    def _retry_after_s(self, num_sequences: int, num_tokens: int, now_s: float) -> int:
        """When so much more will be free, if requests go on to end as fast as they have lately. Where none has, as long
        again as that has been so."""
        begin_s = max(self._busy_since_s, now_s - WINDOW_S)
        if len(self._ends) == MAX_ENDS:
            begin_s = max(begin_s, self._ends[0].at_s)
        span_s = now_s - begin_s
        ends = [end for end in self._ends if end.at_s >= begin_s]
        wait_s = 0.0
        for lacking, freed in (
            (num_sequences, sum(end.num_sequences for end in ends)),
            (num_tokens, sum(end.num_tokens for end in ends)),
        ):
            if lacking:
                wait_s = max(wait_s, span_s * lacking / freed if freed else span_s)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(wait_s)))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
