"""Random requests: the same for the same seed."""

import random
from typing import Any, Literal

import msgspec

from pipeline.cli.bench import words

NUM_PREFIXES = 6
NUM_PREFIX_WORDS = 120
SHORT_WORDS, MIDDLE_WORDS, LONG_WORDS = (2, 30), (40, 250), (500, 900)
STOPS = (".", "\n", " the", "e", " and", "ing ")
SALTS = ("", "red", "blue")
MAX_LEAVE_S = 4.0
EXTRAS = ("priority", "cache_salt", "timeout_s")
"""Fields that a server may not support."""


class RandomRequest(msgspec.Struct, frozen=True):
    """One request of the soak."""

    protocol: Literal["http", "zmq"]
    streams: bool
    prompt: str
    params: dict[str, Any]
    """Named as in the HTTP API and SamplingParams."""
    extras: dict[str, Any]
    """Fields of EXTRAS."""
    leave_after_s: float | None
    """When the client leaves; None to read to the end."""
    says_so: bool
    """Over ZeroMQ, whether a leaving client aborts and reads on, or closes its connection."""

    @property
    def n(self) -> int:
        n: int = self.params["n"]
        return n


def draw(rng: random.Random, known: frozenset[str]) -> RandomRequest:
    """Draw a request; `known` are the EXTRAS that the server supports."""
    params: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 1, 2, 3, 4)),
        "max_tokens": rng.choice((1, 8, 48, 96, 160, 256)),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.3)),
        "seed": rng.randrange(2**32),
        "ignore_eos": rng.random() < 0.7,
    }
    if rng.random() < 0.25:
        params["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    if rng.random() < 0.2:
        params["top_p"] = 0.9
    protocol: Literal["http", "zmq"] = rng.choice(("http", "http", "zmq"))
    return RandomRequest(
        protocol=protocol,
        streams=protocol == "zmq" or rng.random() < 0.7,
        prompt=_prompt(rng),
        params=params,
        extras={name: value for name, value in _extras(rng).items() if name in known},
        leave_after_s=rng.uniform(0.0, MAX_LEAVE_S) if rng.random() < 0.2 else None,
        says_so=rng.random() < 0.5,
    )


def _prompt(rng: random.Random) -> str:
    num_words = rng.randint(*rng.choice((SHORT_WORDS,) * 5 + (MIDDLE_WORDS,) * 4 + (LONG_WORDS,)))
    own = words.text(str(rng.random()), num_words)
    if rng.random() < 0.4:
        return f"{words.text(f'prefix/{rng.randrange(NUM_PREFIXES)}', NUM_PREFIX_WORDS)} {own}"
    return own


def _extras(rng: random.Random) -> dict[str, Any]:
    extras: dict[str, Any] = {"priority": rng.randint(-2, 2)}
    if salt := rng.choice(SALTS):
        extras["cache_salt"] = salt
    if rng.random() < 0.1:
        extras["timeout_s"] = rng.uniform(0.05, 5.0)
    return extras
