"""tools/part_bench/towers.py measures a vision tower beside torch."""

import re
import sys

import pytest

from tools.part_bench import towers


def test_a_tower_and_torch_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["towers", "--rounds", "1", "--layers", "1"])
    assert towers.main() == 0
    out = capsys.readouterr().out
    assert all(float(one) > 0 for one in re.findall(r"float(?:16|32) +([0-9.]+) ", out)) and "linear_add" in out
    (cosine,) = re.findall(r"least cosine of a row: ([0-9.]+)", out)
    assert float(cosine) > 0.999
