"""Leaves out cases of tests with many parameters: those that are kept have every pair of values that any case has.

A test with parameters of 7, 3, 4 and 8 values has 672 cases. Faults mostly depend on one or two of the values, so
about 60 of them find nearly all (D. R. Kuhn, D. R. Wallace, A. M. Gallo, "Software Fault Interactions and Implications
for Software Testing", 2004). Which are kept depends on the ids of cases only, so that a failure repeats.

    PIPELINE_ALL_CASES=1 pytest …      run all of them
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

import pytest

MOST_CASES = 12
"""Tests with at most so many cases keep all of them."""


def covering(cases: Iterable[str]) -> set[str]:
    """Some cases that have every pair of values that any case has. Each is the id of a test's case: values in brackets,
    with hyphens between them."""
    seen: set[tuple[tuple[int, str], ...]] = set()
    kept = set()
    for name in sorted(cases, key=lambda name: (zlib.crc32(name.encode()), name)):
        values = [*enumerate(name.partition("[")[2].rstrip("]").split("-"))]
        groups = {*((value,) for value in values), *combinations(values, 2)}
        if not groups <= seen:
            kept.add(name)
            seen |= groups
    return kept


def selected(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that are run, in their order, and those that are left out."""
    items = list(items)
    if os.environ.get("PIPELINE_ALL_CASES"):
        return items, []
    tests: dict[str, set[str]] = defaultdict(set)
    for item in items:
        tests[item.nodeid.partition("[")[0]].add(item.nodeid)
    left_out: set[str] = set()
    for cases in tests.values():
        if len(cases) > MOST_CASES:
            left_out |= cases - covering(cases)
    return [one for one in items if one.nodeid not in left_out], [one for one in items if one.nodeid in left_out]
