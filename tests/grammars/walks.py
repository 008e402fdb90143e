"""Random walks: each token is sampled uniformly from the ids that the mask allows."""

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from pipeline.grammars.checker import checked
from pipeline.grammars.checks import Check, Checked
from pipeline.grammars.engine import Engine

END = 0.4
"""Probability that an output ends where it may."""

CLOSE = 0.5
"""Probability of sampling an id that closes something, if one is allowed."""

CLOSERS = '"}],:0'


def check(engine: Engine, kind: str, source: str) -> Checked:
    return checked(Check(0, kind, source), engine)


def matcher_of(engine: Engine, kind: str, source: str) -> LLMatcher:
    made = check(engine, kind, source)
    assert not made.error, made.error
    return engine.matcher(made.grammar)


def allowed(matcher: LLMatcher) -> "np.ndarray[Any, Any]":
    """The ids that may follow."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not matcher.is_error(), matcher.get_error()
    return np.flatnonzero(bits)


def accepts(engine: Engine, matcher: LLMatcher, text: str) -> bool:
    """Whether a text is a complete output."""
    copy, ids = matcher.deep_copy(), engine.tokenizer.tokenize_bytes(text.encode())
    return copy.try_consume_tokens(ids) == len(ids) and bool(copy.is_accepting())


def walk(engine: Engine, matcher: LLMatcher, seed: int, max_ids: int = 300) -> str | None:
    """A random output; None if it did not end."""
    rng, matcher = random.Random(seed), matcher.deep_copy()
    closers = {ids[0] for mark in CLOSERS if len(ids := engine.tokenizer.tokenize_str(mark)) == 1}
    ends, sampled = set(engine.eos_ids), []
    for _ in range(max_ids):
        ids = allowed(matcher).tolist()
        assert ids, "no token is allowed, and no error is reported"
        others = [token for token in ids if token not in ends]
        if not others or (len(others) < len(ids) and rng.random() < END):
            return engine.tokenizer.decode_bytes(sampled).decode()
        closing = [token for token in others if token in closers]
        token = rng.choice(closing if closing and rng.random() < CLOSE else others)
        assert matcher.consume_token(token), matcher.get_error()
        sampled.append(token)
    return None
