"""Synthetic traces. The same options and seed give the same trace.

    poisson     independent prompts without common prefixes
    shared      prompts of applications: each begins with the long prefix of one of them, some far more popular (Zipf)
    chat        conversations: each turn repeats the earlier ones, after a pause
    bursts      as `shared`, but a quarter of the time has ten times the rate of the rest

Lengths are lognormal around their mean, as those of real traffic.
"""

import random
from collections.abc import Callable, Iterator
from math import log

import msgspec

from tools.simulator.requests import SimRequest, Trace

SIGMA = 0.6
"""Of the logarithm of a length."""
MEAN_PAUSE_S = 20.0
"""Between an answer and the next turn."""
READ_TOKENS_PER_S = 40.0
"""How fast answers come, for the pause until the next turn."""
SHARED_PART = 0.75
"""Of a prompt's mean length that is the application's prefix."""
BURST_S = 10.0
BURST_FACTOR = 10.0
KEY_BITS = 52


class Shape(msgspec.Struct, frozen=True):
    """The options of a synthetic trace."""

    num_requests: int = 24_000
    rate: float = 100.0
    """Requests per second."""
    prompt_tokens: int = 2000
    output_tokens: int = 200
    num_groups: int = 200
    """Applications of `shared` and `bursts`."""
    num_turns: int = 6
    """Mean turns of a conversation."""
    zipf: float = 1.0
    """Exponent of the popularity of applications; 0: all are equally popular."""
    block_tokens: int = 64
    seed: int = 0


def synthetic(kind: str, shape: Shape) -> Trace:
    """The trace of one of `KINDS`."""
    rng = random.Random(f"{kind} {shape.seed}")
    requests = sorted(KINDS[kind](shape, rng), key=lambda one: one.arrival_s)[: shape.num_requests]
    for index, one in enumerate(requests):
        one.index = index
    return Trace(kind, shape.block_tokens, requests)


def _poisson(shape: Shape, rng: random.Random) -> Iterator[SimRequest]:
    for at_s in _arrivals(shape, rng):
        yield _request(at_s, [], _length(rng, shape.prompt_tokens), shape, rng)


def _shared(shape: Shape, rng: random.Random) -> Iterator[SimRequest]:
    yield from _of_groups(shape, rng, _arrivals(shape, rng))


def _bursts(shape: Shape, rng: random.Random) -> Iterator[SimRequest]:
    # A quarter of the time at 10 r and the rest at r: r = rate / 3.25
    quiet = shape.rate / (0.25 * BURST_FACTOR + 0.75)

    def arrivals() -> Iterator[float]:
        at_s = 0.0
        for _ in range(shape.num_requests):
            is_burst = at_s % (4 * BURST_S) >= 3 * BURST_S
            at_s += rng.expovariate(quiet * BURST_FACTOR if is_burst else quiet)
            yield at_s

    yield from _of_groups(shape, rng, arrivals())


def _of_groups(shape: Shape, rng: random.Random, arrivals: Iterator[float]) -> Iterator[SimRequest]:
    mean = SHARED_PART * shape.prompt_tokens
    groups = [_keys(rng, _length(rng, mean) // shape.block_tokens) for _ in range(shape.num_groups)]
    weights = [1 / (index + 1) ** shape.zipf for index in range(shape.num_groups)]
    own = shape.prompt_tokens - mean
    for at_s, group in zip(arrivals, rng.choices(groups, weights, k=shape.num_requests), strict=True):
        num_prompt = len(group) * shape.block_tokens + _length(rng, own)
        yield _request(at_s, group, num_prompt, shape, rng)


def _chat(shape: Shape, rng: random.Random) -> Iterator[SimRequest]:
    """`prompt_tokens` is the mean prompt over all turns, with the conversation so far."""
    num_turns = shape.num_turns
    turn_tokens = max(16.0, 2 * shape.prompt_tokens / (num_turns + 1) - shape.output_tokens)
    # The trace begins amid conversations: otherwise it would have fewer requests at first.
    begun_s = -2 * num_turns * (MEAN_PAUSE_S + shape.output_tokens / READ_TOKENS_PER_S)
    while begun_s < 1.5 * shape.num_requests / shape.rate:
        begun_s += rng.expovariate(shape.rate / num_turns)
        at_s, num_ids, keys, session = begun_s, 0, list[int](), rng.getrandbits(KEY_BITS)
        for _ in range(rng.randint(1, 2 * num_turns - 1)):
            num_ids += _length(rng, turn_tokens)
            keys += _keys(rng, num_ids // shape.block_tokens - len(keys))
            num_output = _length(rng, shape.output_tokens)
            after = _keys(rng, (num_ids + num_output) // shape.block_tokens - len(keys))
            if at_s >= 0:
                yield SimRequest(0, at_s, num_ids, (num_output,), tuple(keys), tuple(after), session=session)
            keys += after
            num_ids += num_output
            at_s += num_output / READ_TOKENS_PER_S + rng.expovariate(1 / MEAN_PAUSE_S)


KINDS: dict[str, Callable[[Shape, random.Random], Iterator[SimRequest]]] = {
    "poisson": _poisson,
    "shared": _shared,
    "chat": _chat,
    "bursts": _bursts,
}


def _arrivals(shape: Shape, rng: random.Random) -> Iterator[float]:
    at_s = 0.0
    for _ in range(shape.num_requests):
        at_s += rng.expovariate(shape.rate)
        yield at_s


def _length(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.lognormvariate(log(mean) - SIGMA**2 / 2, SIGMA)))


def _keys(rng: random.Random, num: int) -> list[int]:
    return [rng.getrandbits(KEY_BITS) for _ in range(num)]


def _request(at_s: float, prefix: list[int], num_prompt: int, shape: Shape, rng: random.Random) -> SimRequest:
    keys = prefix + _keys(rng, num_prompt // shape.block_tokens - len(prefix))
    return SimRequest(0, at_s, num_prompt, (_length(rng, shape.output_tokens),), tuple(keys))
