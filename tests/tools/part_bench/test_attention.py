"""tools/part_bench/attention.py measures attention of prompts beside the CPU's peak."""

import re
import sys
from pathlib import Path

import pytest

from pipeline.kernels.cpu import native_library
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from tools.part_bench import attention as attention_bench
from tools.part_bench.attention import SHAPES, Layers

ROOT = Path(attention_bench.__file__).parents[2]


def test_products_with_keys_after_the_query_are_not_counted() -> None:
    layers = Layers(native_library.load(build(available()[0], print)), 9, 3, 64, 20, 2, 1)
    try:
        assert layers.run() > 0
        assert layers.flop == sum(range(1, 21)) * 9 * 64 * 2 * 2  # of one layer; scores and sums of values
    finally:
        layers.close()


def test_two_trees_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--against", str(ROOT), "--prompts", "20,33", "--rounds", "2", "--layers", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["attention_bench", *options])
    attention_bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "times as fast" in line]
    assert [tuple(row.split()[:2]) for row in rows] == [(shape, tokens) for shape in SHAPES for tokens in ("20", "33")]
    for row in rows:
        figures = re.search(r"peak +(\S+) GFLOP/s  other (\S+) ms (\S+) %  this (\S+) ms (\S+) %  (\S+) times", row)
        assert figures and all(float(figure) > 0 for figure in figures.groups())


@pytest.mark.parametrize("options", [["--prompts", "0"], ["--rounds", "0"], ["--layers", "0"], ["--threads", "0"]])
def test_numbers_below_one_are_refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attention_bench", *options])
    with pytest.raises(SystemExit):
        attention_bench.main()
