"""How many replicas does this traffic need?"""

from collections.abc import Callable

from tools.simulator.summary import Summary


def meets(summary: Summary, p99_ttft_s: float) -> bool:
    """Whether a number of replicas is enough. Refused requests count as infinite times, but may be fewer than 1 %."""
    return summary.ttft_p99_s <= p99_ttft_s and not summary.num_refused


def find_replicas(
    simulate: Callable[[int], Summary], p99_ttft_s: float, max_replicas: int
) -> tuple[int | None, list[Summary]]:
    """The least number of replicas that is enough: doubled until it is, then by bisection, which takes for granted that
    more replicas are no worse. Returns None for it if `max_replicas` are too few, and the summaries of all numbers that
    were simulated, by number."""
    tried: dict[int, Summary] = {}

    def is_enough(num: int) -> bool:
        tried[num] = simulate(num)
        return meets(tried[num], p99_ttft_s)

    low, high = 0, 1
    while not is_enough(high):
        if high == max_replicas:
            return None, _by_number(tried)
        low, high = high, min(2 * high, max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high, _by_number(tried)


def _by_number(tried: dict[int, Summary]) -> list[Summary]:
    return [tried[num] for num in sorted(tried)]
