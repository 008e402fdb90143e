"""tools/part_bench/schedule.py measures the cost of scheduling steps."""

import json
from pathlib import Path

import pytest

from tools.part_bench import schedule as schedule_bench
from tools.part_bench.schedule import BLOCK_SIZE, NUM_GROUPS, StepCost, measure, missed, times_of


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_a_step_is_measured_with_and_without_block_boundaries(depth: int, caching: bool) -> None:
    tenths = times_of(40, caching, depth, 160, NUM_GROUPS)
    share = len(tenths.crossing) / len(tenths.crossing + tenths.quiet)
    assert share == pytest.approx(NUM_GROUPS / BLOCK_SIZE, abs=0.02)
    evenly = times_of(40, caching, depth, 160, BLOCK_SIZE)
    assert not evenly.quiet and len(evenly.reports) == 160


def test_few_rows_have_no_tenth_to_measure() -> None:
    cost = measure(2, True, num_steps=20)
    assert cost.p50 > 0 and cost.p99 >= cost.p50
    assert cost.none_cross == cost.tenth_crosses == 0


def test_a_bound_applies_to_its_number_of_rows_with_caching() -> None:
    def cost(num_rows: int, caching: bool, p50: float) -> StepCost:
        return StepCost(num_rows, caching, p50, p50, p50, p50, 1.0)

    assert missed([cost(32, True, 100), cost(64, True, 9000), cost(256, False, 9000), cost(1024, True, 800)]) == []
    assert len(missed([cost(32, True, 101), cost(256, True, 251), cost(1024, True, 801)])) == 3


def test_the_command_prints_a_line_for_each_case_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert schedule_bench.main(["3", "--steps", "16", "--json", str(path), "--check"]) == 0
    assert [cost["prefix_caching"] for cost in json.loads(path.read_bytes())] == [False, True]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["3", "off"], ["3", "on"]]


def test_a_missed_bound_fails_only_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_bench, "BOUNDS_US", {3: 0.0})
    assert schedule_bench.main(["3", "--steps", "16"]) == 0
    assert schedule_bench.main(["3", "--steps", "16", "--check"]) == 1
