"""tools/part_bench/products.py measures products with weights, by rows."""

import re
import sys
from pathlib import Path

import pytest

from tools.part_bench import products as products_bench

ROOT = Path(products_bench.__file__).parents[2]


def test_two_trees_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--columns", "48", "--depth", "256", "--rounds", "2"]
    options = ["--against", str(ROOT), "--formats", "bf16,q8_0,q4_k,q6_k", "--rows", "1,3,30", *shape]
    for activations in ("int8", "int12"):
        monkeypatch.setattr(sys, "argv", ["products", *options, "--activations", activations])
        products_bench.main()
        rows = [line for line in capsys.readouterr().out.splitlines() if "times as fast" in line]
        assert [tuple(row.split()[:2]) for row in rows] == [
            (format, rows) for format in ("bf16", "q8_0", "q4_k", "q6_k") for rows in ("1", "3", "30")
        ]
        for row in rows:
            figures = re.search(r"other +(\S+) µs \( *(\S+) of 1\)  this +(\S+) µs \( *(\S+) of 1\)  (\S+) times", row)
            assert figures and all(float(figure) > 0 for figure in figures.groups())


@pytest.mark.parametrize(
    "options", [["--rows", "0"], ["--rounds", "0"], ["--formats", "q4_k,q3"], ["--activations", "4"]]
)
def test_options_that_mean_nothing_are_refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["products", *options])
    with pytest.raises(SystemExit):
        products_bench.main()
