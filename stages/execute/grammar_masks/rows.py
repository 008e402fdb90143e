"""The rows of the process that computes masks, and what is done to a mask behind the library."""

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from pipeline.grammars.engine import Engine, short_message
from pipeline.runtime.messages import NOTHING_LEFT
from pipeline.stages.execute.grammar_masks.memory import WordArray
from pipeline.stages.execute.grammar_masks.reasoning_budget import BudgetState

IdArray = np.ndarray[tuple[int], np.dtype[np.int64]]

NO_TOKEN_LEFT = f"{NOTHING_LEFT}: the grammar allows none of the model's tokens"


class MaskError(Exception):
    """A row has no mask. The message is for the client."""


@dataclass(slots=True)
class MatcherRow:
    """A row with a grammar."""

    matcher: LLMatcher
    stop_ids: IdArray
    ignores_eos: bool


@dataclass(slots=True)
class BudgetedRow:
    """A row with a reasoning budget, and perhaps a grammar."""

    budget: BudgetState
    inner: MatcherRow | None

    def consume(self, ids: list[int]) -> None:
        """Raises MaskError."""
        if self.inner is not None:
            consume(self.inner.matcher, ids)
        self.budget.push_all(ids)


def consume(matcher: LLMatcher, ids: list[int]) -> None:
    """Raises MaskError."""
    if ids and not matcher.consume_tokens(ids):
        raise MaskError(not_consumed(matcher))


def not_consumed(matcher: LLMatcher) -> str:
    """Why a matcher has not taken an id."""
    return why(matcher, "the output does not match the grammar")


def not_computed(matcher: LLMatcher) -> str:
    """Why a matcher has no mask."""
    return why(matcher, "its next ids could not be computed")


def why(matcher: LLMatcher, what: str) -> str:
    """A matcher's error, for the client."""
    return f"{what}: {short_message(matcher.get_error())}" if matcher.get_error() else what


def allow_text_form(engine: Engine, matcher: LLMatcher, words: WordArray) -> None:
    """Replace a mask that allows only special tokens by one with text.

    If only one text can follow, the library allows the ids that its tokenizer makes of it. The tokenizer takes text
    such as <|im_end|> for the special token, which the grammar does not accept. This allows the text's first ordinary
    token instead. Special tokens that the grammar itself requires are forced as byte 0xFF and their id.
    """
    text = matcher.compute_ff_bytes().partition(b"\xff")[0].decode(errors="ignore")
    if parts := engine.tokenizer.greedy_tokenize(text):
        words[:] = 0
        if parts[0] < engine.vocab_size:
            words[parts[0] // 32] = np.uint32(1) << np.uint32(parts[0] % 32)


def end_by(row: MatcherRow, eos_ids: IdArray, words: WordArray) -> None:
    """Allow or forbid the ids that end the output. The library allows EOS ids exactly where the output may end."""
    may_end = has(words, int(eos_ids[0]))
    if may_end and row.ignores_eos:
        without(words, eos_ids)
    if len(row.stop_ids):
        if may_end:
            np.bitwise_or.at(words, row.stop_ids // 32, bits_of(row.stop_ids))
        else:
            without(words, row.stop_ids)


def texts(engine: Engine) -> WordArray:
    """A mask of all ids except special tokens."""
    words = np.full(-(-engine.vocab_size // 32), 0xFFFF_FFFF, np.uint32)
    num_ids = min(engine.vocab_size, engine.tokenizer.vocab_size)
    special = np.array([token for token in range(num_ids) if engine.tokenizer.is_special_token(token)], np.int64)
    forbid(words, special)
    return words


def has(words: WordArray, token: int) -> bool:
    """Whether a mask allows an id."""
    return bool(words[token // 32] >> np.uint32(token % 32) & 1)


def forbid(words: WordArray, ids: IdArray) -> None:
    """Forbid ids."""
    np.bitwise_and.at(words, ids // 32, ~bits_of(ids))


def without(words: WordArray, ids: IdArray) -> None:
    """Forbid ids, unless no other id is allowed."""
    before = words.copy()
    forbid(words, ids)
    if not words.any():
        words[:] = before


def bits_of(ids: IdArray) -> WordArray:
    """The bit of each id in its word."""
    return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
