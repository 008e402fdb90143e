"""The next masks of many rows at once, each after one more id: what nearly every order is.

The library computes them in threads of its own, without Python's lock, and the rest is done for all rows together. Row
by row most of the time was Python's, and threads made it longer.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

from pipeline.grammars.engine import Engine
from pipeline.stages.execute.grammar_masks.memory import SLOW_STEP_S, TimeArray, WordArray
from pipeline.stages.execute.grammar_masks.rows import (
    NO_TOKEN_LEFT,
    IdArray,
    MatcherRow,
    allow_text_form,
    end_by,
    forbid,
    not_computed,
    not_consumed,
    texts,
)

POOL_S = 0.4e-3
"""Work that is worth the time for waking threads."""

FIRST_WORDS = 64
"""Words of a mask that are looked at first."""

NUM_TIMED = 16
"""So many orders are computed row by row behind one that was slow: the library doesn't tell the time of each row."""


class NextMasks:
    """Writes masks to `words` [places, ceil(V / 32)]. The library's masks are for all of the tokenizer's ids; those
    beyond the model's are cut off."""

    def __init__(self, engine: Engine, words: WordArray, times: TimeArray, num_threads: int) -> None:
        """`times` [places] get the CPU time of each mask."""
        self._engine, self._words, self._times = engine, words, times
        self._num_timed = 0
        """Orders that are to be computed row by row."""
        self._pool = LLExecutor(num_threads) if num_threads > 1 else None
        self._row_s = 25e-6
        """The library's time for a row in one thread, estimated."""
        num_words = -(-engine.tokenizer.vocab_size // 32)
        has_others = engine.tokenizer.vocab_size != engine.vocab_size
        self._wide = np.zeros((len(words), num_words), np.uint32) if has_others else words
        self._last_bits = np.uint32(2 ** ((engine.vocab_size - 1) % 32 + 1) - 1)
        self._texts = texts(engine)
        self._eos_ids = np.array(engine.eos_ids, np.int64)
        self._not_eos = np.full(words.shape[1], 0xFFFF_FFFF, np.uint32)
        forbid(self._not_eos, self._eos_ids)

    def fill(self, rows: Sequence[MatcherRow], slots: IdArray, ids: Sequence[int]) -> dict[int, str]:
        """Consume an id for each row, and write the mask behind it to the row's place. Returns errors by index.

        A panic of the library leaves it unknown which rows have consumed their id.
        """
        matchers = [row.matcher for row in rows]
        pool = self._pool if len(rows) * self._row_s > POOL_S and not self._num_timed else None
        self._num_timed = max(0, self._num_timed - 1)
        self._times[slots] = 0
        began_s = time.perf_counter()
        # The library takes any single id after the end.
        has_ended = [matcher.is_stopped() for matcher in matchers]
        pairs = list(zip(matchers, ids, strict=True))
        if pool is None:
            consumed = []
            for slot, (matcher, each) in zip(slots.tolist(), pairs, strict=True):
                row_began_s = time.thread_time()
                consumed.append(matcher.consume_token(each))
                self._times[slot] = time.thread_time() - row_began_s
        else:
            consumed = pool.consume_token_par(pairs)
        failed = {i: not_consumed(matchers[i]) for i in range(len(rows)) if has_ended[i] or not consumed[i]}
        self._compute(matchers, slots, failed, pool)
        took_s = time.perf_counter() - began_s
        if pool is not None and took_s > SLOW_STEP_S:
            self._num_timed = NUM_TIMED
        row_s = took_s / len(rows)
        # In the pool, a row may take more time than its part, but not less.
        self._row_s = row_s if pool is None else max(self._row_s, row_s)

        special = [i for i in self._without_text(slots) if i not in failed]
        for i in special:
            allow_text_form(self._engine, matchers[i], self._words[slots[i]])
        self._end(rows, slots)
        for i in special:
            if not self._words[slots[i]].any():
                failed[i] = NO_TOKEN_LEFT
        return failed

    def _without_text(self, slots: IdArray) -> list[int]:
        """Indices of the masks that allow only special tokens. Nearly all have one of the first ids, which vocabularies
        give to bytes and short texts, so few masks are read as a whole."""
        first = (self._words[slots, :FIRST_WORDS] & self._texts[:FIRST_WORDS]).any(axis=1)
        return [i for i in np.flatnonzero(~first).tolist() if not (self._words[slots[i]] & self._texts).any()]

    def _compute(
        self, matchers: Sequence[LLMatcher], slots: IdArray, failed: dict[int, str], pool: LLExecutor | None
    ) -> None:
        """Write the library's masks, and add to `failed`."""
        pairs = zip(matchers, slots.tolist(), strict=True)
        good = [pair for i, pair in enumerate(pairs) if i not in failed]
        wide = self._wide
        address, num_bytes = wide.ctypes.data, wide.strides[0]
        if pool is None:
            for matcher, slot in good:
                began_s = time.thread_time()
                matcher.unsafe_compute_mask_ptr(address + slot * num_bytes, num_bytes)
                self._times[slot] += time.thread_time() - began_s
        elif good:  # the library refuses an empty list
            pool.unsafe_compute_mask_ptr(good, address, num_bytes, len(wide))
        if wide is not self._words:
            self._words[slots] = wide[slots, : self._words.shape[1]]
            self._words[slots, -1] &= self._last_bits
        for i, matcher in enumerate(matchers):
            if i not in failed and matcher.is_error():
                failed[i] = not_computed(matcher)

    def _end(self, rows: Sequence[MatcherRow], slots: IdArray) -> None:
        """`end_by` for all rows."""
        words, end = self._words, int(self._eos_ids[0])
        ignores = np.array([row.ignores_eos and not len(row.stop_ids) for row in rows])
        may_end = (words[slots, end // 32] >> np.uint32(end % 32) & 1).astype(np.bool_)
        if len(ending := slots[ignores & may_end]):
            rest = words[ending] & self._not_eos
            goes_on = rest.any(axis=1)
            words[ending[goes_on]] = rest[goes_on]
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if len(row.stop_ids):
                end_by(row, self._eos_ids, words[slot])
