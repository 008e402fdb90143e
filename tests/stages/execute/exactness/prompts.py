"""Requests whose texts are compared with those of each alone."""

from typing import Any

from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import GREEDY, Request


def requests_with(prefix: list[int], n: int = 1, more: tuple[tuple[str, Any], ...] = ()) -> list[Request]:
    """Ten prompts, four of which begin with `prefix`, some greedy; `n` samples of each."""
    prompts = [random_ids(num, num) for num in (1, 16, 17, 40, 97, 120)]
    prompts += [prefix + random_ids(num, num) for num in (3, 30, 11)] + [prefix + random_ids(3, 3)]
    return [
        Request(tuple(prompt), 20 + 7 * (i % 5), seed=GREEDY if i % 4 else i, n=n, at_step=3 * i, fields=more)
        for i, prompt in enumerate(prompts)
    ]
