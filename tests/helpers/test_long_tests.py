"""Some cases of each test are run. tests/tools/checks/test_check.py checks that what is left out names tests."""

import pytest

from tests.long_tests import FEW, LEAST, LONG, ONE, selected


def test_some_cases_of_each_test_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    def items(prefix: str, num: int) -> list[Item]:
        name = prefix if "::" in prefix else f"{prefix}::test_x"
        return [Item(f"{name}[{number}]") for number in range(num)]

    monkeypatch.delenv("PIPELINE_ALL_CASES", raising=False)
    for prefix in (*FEW, *ONE):
        for num in (1, LEAST, LEAST + 1, 60):
            made = items(prefix, num)
            kept, left_out = selected(made)  # type: ignore[arg-type]
            expected = 1 if made[0].nodeid.startswith(ONE) else min(num, max(LEAST, num // FEW[prefix]))
            assert len(kept) == expected
            assert {id(one) for one in (*kept, *left_out)} == {id(one) for one in made}
            again, _ = selected(reversed(made))  # type: ignore[arg-type]
            assert {id(one) for one in again} == {id(one) for one in kept}, "in any order"
    long = [Item(prefix) for prefix in LONG]
    assert selected(long) == ([], long)  # type: ignore[arg-type]
    monkeypatch.setenv("PIPELINE_ALL_CASES", "1")
    assert selected(long) == (long, [])  # type: ignore[arg-type]
