"""The cases that are left out have no pair of values that is not tested."""

from itertools import combinations, product

import pytest

from tests.pairwise import MOST_CASES, covering, selected

VALUES = [[f"{name}{number}" for number in range(num)] for name, num in (("a", 7), ("b", 3), ("c", 4), ("d", 8))]
CASES = [f"tests/test_x.py::test_y[{'-'.join(values)}]" for values in product(*VALUES)]


def test_every_pair_of_values_is_kept() -> None:
    kept = covering(CASES)
    found = {pair for case in kept for pair in combinations(case.partition("[")[2].rstrip("]").split("-"), 2)}
    assert found == {pair for one, other in combinations(VALUES, 2) for pair in product(one, other)}
    assert 7 * 8 <= len(kept) < len(CASES) / 5


def test_the_same_cases_are_kept_in_any_order() -> None:
    assert covering(CASES) == covering(reversed(CASES))


def test_cases_with_a_value_of_their_own_are_all_kept() -> None:
    cases = [f"tests/test_x.py::test_z[{number}-same]" for number in range(100)]
    assert covering(cases) == set(cases)


def test_few_cases_and_all_of_them_on_request_are_kept(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(num: int) -> list[pytest.Item]:
        names = [f"[{a}-{b}-{c}]" for a, b, c in product(range(2), range(2), range(num // 4))]
        return [pytest.Function.from_parent(request.node.parent, name=name, callobj=cases) for name in names]

    monkeypatch.delenv("PIPELINE_ALL_CASES", raising=False)
    assert selected(few := cases(MOST_CASES)) == (few, [])
    kept, left_out = selected(many := cases(40))
    assert sorted(map(id, kept + left_out)) == sorted(map(id, many)) and len(left_out) >= 8
    monkeypatch.setenv("PIPELINE_ALL_CASES", "1")
    assert selected(many) == (many, [])
