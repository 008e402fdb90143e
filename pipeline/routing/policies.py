"""Policies that choose a replica.

`PredictedTTFT` is the one to use; the others are what proxies offer, to compare with. Traps that it avoids, because it
has one cost and no thresholds: a busy replica keeps getting the prefixes that it has; all requests without a known
prefix go to one replica; a short common prefix, such as a system prompt of every request, decides alone.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil
from typing import Any, Protocol

import msgspec
import numpy as np

Float64s = np.ndarray[Any, np.dtype[np.float64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]

NUM_POINTS = 64
"""Points of a replica on the ring of consistent hashing."""
WEIGHT = 1.0
"""Of tokens to compute, in `PredictedTTFT`; see docs/scale.md."""
BOUND = 1.25
"""A replica on the ring is skipped if it has this many times its share of open requests."""


class Prompt(msgspec.Struct, frozen=True):
    """What a policy knows of a request."""

    num_tokens: int
    """Of its prompt, an estimate."""
    keys: Sequence[int] = ()
    """Of its prefixes; see keys.py."""
    session: int | None = None
    """Requests of a conversation, or of a user, have the same."""
    num_sequences: int = 1


class Loads:
    """The load of each replica, from what one router has routed. Arrays of one entry for each place; those of replicas
    that are gone are not `is_open`."""

    def __init__(self) -> None:
        self.queued: Float64s = np.zeros(0)
        """Prompt tokens that are to be computed for requests without a first token."""
        self.num_open: Int64s = np.zeros(0, np.int64)
        """Open sequences."""
        self.tokens_per_s: Float64s = np.zeros(0)
        """Speed of prefill."""
        self.open_s: Float64s = np.zeros(0)
        """What an open sequence adds to the time to first token of a new one."""
        self.is_open = np.zeros(0, np.bool_)
        self.open_indices: Int64s = np.zeros(0, np.int64)
        """Where `is_open`."""

    def grow(self, num_replicas: int) -> None:
        """Have at least so many places."""
        more = num_replicas - len(self.queued)
        if more > 0:
            for name in ("queued", "num_open", "tokens_per_s", "open_s", "is_open"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros(more, old.dtype))))

    def set_open(self, index: int, is_open: bool) -> None:
        """A replica takes requests from now on, or no longer."""
        self.is_open[index] = is_open
        self.open_indices = np.flatnonzero(self.is_open)


class Policy(Protocol):
    """Chooses among the places of `loads`, of which at least one is open."""

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        """The place of the replica that gets a request. `cached` has the tokens of its prompt that replicas have in
        their caches, by place, where there are any."""
        ...

    uses_keys: bool
    """Whether it needs `cached`."""


class PredictedTTFT:
    """The replica with the least predicted time to first token:

        (queued tokens + weight · tokens of this prompt that are not cached) / tokens per second
            + open sequences · open_s

    The prediction has weight 1. A larger `weight` also counts what the tokens cost the requests that come later: more
    prompt tokens come from caches, and single requests wait longer for a replica that has theirs. Equal ones are chosen
    at random."""

    uses_keys = True

    def __init__(self, seed: int = 0, weight: float = WEIGHT) -> None:
        self._random = random.Random(seed)
        self._weight = weight

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        weight = self._weight
        tokens = loads.queued + weight * prompt.num_tokens
        for index, num_tokens in cached.items():
            tokens[index] -= weight * num_tokens
        seconds = tokens[loads.open_indices] / loads.tokens_per_s[loads.open_indices]
        seconds += loads.num_open[loads.open_indices] * loads.open_s[loads.open_indices]
        least = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-9))
        return int(loads.open_indices[least[0] if len(least) == 1 else least[self._random.randrange(len(least))]])


class ConsistentHash:
    """The replica at the session's place on a ring, or at that of the prompt's first key (Karger et al., 1997). With a
    `bound`, replicas that have more than so many times their share of open requests are skipped (Mirrokni et al.,
    2018, arXiv:1608.01350). Requests without either go anywhere."""

    uses_keys = False

    def __init__(self, seed: int = 0, bound: float = float("inf")) -> None:
        self._random = random.Random(seed)
        self._bound = bound
        self._points: list[tuple[int, int]] = []
        self._of: bytes = b""

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        if (open_bytes := loads.open_indices.tobytes()) != self._of:
            self._of = open_bytes
            self._points = sorted(
                (_hash(index, point), index) for index in loads.open_indices.tolist() for point in range(NUM_POINTS)
            )
        name = prompt.session if prompt.session is not None else next(iter(prompt.keys), None)
        point = self._random.getrandbits(64) if name is None else _hash(name, -1)
        first = bisect_left(self._points, (point, -1))
        if self._bound == float("inf"):
            return self._points[first % len(self._points)][1]
        most = ceil(self._bound * (int(loads.num_open[loads.open_indices].sum()) + 1) / len(loads.open_indices))
        ring = (self._points[(first + step) % len(self._points)][1] for step in range(len(self._points)))
        return next(index for index in ring if loads.num_open[index] < most)


class PowerOfTwo:
    """The replica with fewer open requests, of two that are chosen at random (Mitzenmacher, 2001)."""

    uses_keys = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        num = len(loads.open_indices)
        one = self._random.randrange(num)
        other = (one + 1 + self._random.randrange(num - 1)) % num if num > 1 else one
        first, second = int(loads.open_indices[one]), int(loads.open_indices[other])
        return first if loads.num_open[first] <= loads.num_open[second] else second


class LeastOpen:
    """The replica with the fewest open requests; equal ones are chosen at random."""

    uses_keys = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        num_open = loads.num_open[loads.open_indices]
        least = np.flatnonzero(num_open == num_open.min())
        return int(loads.open_indices[least[self._random.randrange(len(least))]])


class RoundRobin:
    """One after the other."""

    uses_keys = False

    def __init__(self, seed: int = 0) -> None:
        self._next = seed

    def choose(self, prompt: Prompt, loads: Loads, cached: dict[int, int]) -> int:
        self._next += 1
        return int(loads.open_indices[self._next % len(loads.open_indices)])


POLICIES: dict[str, Callable[[int], Policy]] = {
    "predicted-ttft": PredictedTTFT,
    "consistent-hash": ConsistentHash,
    "bounded-hash": lambda seed: ConsistentHash(seed, BOUND),
    "power-of-two": PowerOfTwo,
    "least-open": LeastOpen,
    "round-robin": RoundRobin,
}
"""By name, with a seed."""


def _hash(name: int, point: int) -> int:
    data = name.to_bytes(16, "little", signed=True) + point.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
