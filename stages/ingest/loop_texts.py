"""How long a text may be that is encoded in the loop, which all others wait for.

A tokenizer takes about half a microsecond for a byte of text. But with some patterns and models the time grows with the
square of a run of digits, or worse: 20,000 digits take the tokenizers of some families 0.3 to 1.7 s. So a few texts are
tried at the start, and what a text has taken in the loop counts too. Longer ones are encoded in threads.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tokenizers import Tokenizer

from pipeline.runtime.messages import IngestInbox
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.runtime.stage import Stage
from pipeline.stages.ingest.encoder_threads import EncoderThreads

LONG_BYTES = 20_000
"""With most tokenizers: about 10 ms of work."""
LOOP_S = 0.05
"""The most that a text in the loop may take."""
GUESS_S = 0.7 * LOOP_S
"""The same for what is guessed from shorter texts: later ones take longer when others use the CPU's caches."""
PIECES = ("1", "½", "a", "A", "1a", " ", "\n", " \n", "!", "é", "一", "가", "\u0301")
"""Texts of one of these again and again are tried."""
SIZES = (20, 128, 1024, 4096)
"""Bytes of the texts that are tried, until one takes too long: some patterns take twice as long for each byte."""
EVENT = "loop texts"
END = "x!"
"""Behind the repeated piece: a pattern that must reach the end fails there."""


class LoopTexts:
    """Decides which texts are encoded in the loop."""

    def __init__(self, stage: Stage[IngestInbox]) -> None:
        self._stage = stage
        self._most = LONG_BYTES
        stage.replay_context.perform(EVENT, lambda most, _: self._set(most))

    def may_have(self, cost_bytes: int) -> bool:
        """Whether a prompt of this cost is encoded in the loop."""
        return cost_bytes < self._most

    async def measure(self, threads: EncoderThreads, tokenizer: Tokenizer) -> None:
        """Try some texts, in a thread."""
        most = await threads.run_alone(lambda _: longest(tokenizer))
        if not self._stage.replay_context.is_replaying:
            self._set(most)

    @contextmanager
    def timed(self, cost_bytes: int) -> Iterator[None]:
        """Prepare a prompt of this cost in the loop."""
        begin_s = time.thread_time()
        try:
            yield
        finally:
            took_s = time.thread_time() - begin_s
            if took_s > LOOP_S and not self._stage.replay_context.is_replaying:
                most = max(1, int(cost_bytes * LOOP_S / took_s / 2))
                asyncio.get_running_loop().call_soon(self._set, most)  # between two turns, as in a replay

    def _set(self, most: int) -> None:
        if most >= self._most:
            return
        self._stage.replay_context.event(EVENT, most)
        self._most = most
        fields = {"from_bytes": most}
        self._stage.log.info("the tokenizer is slow: prompts are encoded in threads", extra={"fields": fields})


def longest(tokenizer: Tokenizer) -> int:
    """The bytes of the longest text that is encoded in less than GUESS_S, as far as texts of PIECES tell; at most
    LONG_BYTES. Takes about 20 ms, in which other threads run."""
    return min(_longest_of(tokenizer, piece) for piece in PIECES)


def _longest_of(tokenizer: Tokenizer, piece: str) -> int:
    before_s = 0.0
    for index, size in enumerate(SIZES):
        text = piece * (size // len(piece.encode())) + END
        if (took_s := _took_s(tokenizer, text)) > GUESS_S / 5:
            took_s = min(took_s, _took_s(tokenizer, text))  # the process may have done something else as well
        if took_s > GUESS_S or size == SIZES[-1]:
            factor = size / SIZES[index - 1] if index else 2.0
            growth = max(1.0, math.log(took_s / (before_s or took_s / 4), factor))
            return min(LONG_BYTES, int(size * (GUESS_S / took_s) ** (1 / growth)))
        before_s = took_s
    raise AssertionError("the last size returns")


def _took_s(tokenizer: Tokenizer, text: str) -> float:
    begin_s = time.thread_time()
    with suppress(Exception), panics_as_errors():  # a client's text that fails like that gets an error
        tokenizer.encode_batch_fast([text])
    return max(time.thread_time() - begin_s, 1e-6)
