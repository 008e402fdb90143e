"""What is left out names tests that there are, and some cases of each test are run."""

import ast
from pathlib import Path

import pytest

from tests.long_tests import FEW, LEAST, LONG, selected

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("prefix", [*LONG, *FEW])
def test_a_name_is_that_of_a_test(prefix: str) -> None:
    file, _, name = prefix.partition("::")
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not name or name.partition("[")[0] in names


def test_some_cases_of_each_test_are_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    def items(prefix: str, num: int) -> list[Item]:
        name = prefix if "::" in prefix else f"{prefix}::test_x"
        return [Item(f"{name}[{number}]") for number in range(num)]

    monkeypatch.delenv("PIPELINE_ALL_CASES", raising=False)
    for prefix, share in FEW.items():
        for num in (1, LEAST, LEAST + 1, 60):
            made = items(prefix, num)
            kept, left_out = selected(made)  # type: ignore[arg-type]
            assert len(kept) == (max(LEAST, num // share) if num > LEAST else num)
            assert {id(one) for one in (*kept, *left_out)} == {id(one) for one in made}
            again, _ = selected(reversed(made))  # type: ignore[arg-type]
            assert {id(one) for one in again} == {id(one) for one in kept}, "in any order"
    long = [Item(prefix) for prefix in LONG]
    assert selected(long) == ([], long)  # type: ignore[arg-type]
    monkeypatch.setenv("PIPELINE_ALL_CASES", "1")
    assert selected(long) == (long, [])  # type: ignore[arg-type]
