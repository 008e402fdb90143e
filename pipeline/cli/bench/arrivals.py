"""The times at which the requests of an open loop arrive."""

import random
from collections.abc import Iterator
from itertools import accumulate, takewhile
from math import inf

import msgspec


class Arrivals(msgspec.Struct, frozen=True):
    """When requests arrive, as `vllm bench serve` has it: the gaps between them have a gamma distribution."""

    request_rate: float
    """Requests a second; infinite if all arrive at once."""
    burstiness: float = 1.0
    """Shape of the distribution: 1 is a Poisson process, less is more bursty, more is more uniform."""
    max_concurrency: int | None = None
    """The most requests of them that are open at any time; the others wait in the client, and their TTFT begins when
    they are sent."""

    def times_s(self, seed: str, *, num_requests: int | None = None, duration_s: float = inf) -> list[float]:
        """The seconds from the start at which requests arrive: `num_requests` of them, scaled so that the last one
        arrives after `num_requests / request_rate`, or those within `duration_s`."""
        if self.request_rate == inf:
            assert num_requests is not None
            return [0.0] * num_requests
        times = accumulate(self._gaps_s(random.Random(seed)))
        if num_requests is None:
            return list(takewhile(lambda time_s: time_s < duration_s, times))
        found = [time_s for time_s, _ in zip(times, range(num_requests), strict=False)]
        scale = num_requests / self.request_rate / found[-1] if found[-1] > 0 else 1.0
        return [scale * time_s for time_s in found]

    def _gaps_s(self, drawn: random.Random) -> Iterator[float]:
        scale_s = 1 / (self.request_rate * self.burstiness)
        while True:
            yield drawn.gammavariate(self.burstiness, scale_s)
