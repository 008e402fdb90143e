"""The figures, ratios and chart of tools/compare_peers."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.options import Length, Workload
from pipeline.cli.bench.report import BenchReport
from tools.compare_peers.loads import loads_of
from tools.compare_peers.machine import Commit, Machine
from tools.compare_peers.measure import Failure, Plan, Run
from tools.compare_peers.model import ModelPaths, weights_of
from tools.compare_peers.peers import Programs, peers_of
from tools.compare_peers.report import Provenance, Results, median_of


def summary(concurrency: int, rate: float, **changes: Any) -> Summary:
    spread = Distribution(10, rate, rate / 10, rate / 5, rate / 2, rate)
    numbers = (1.0, 10, 0, {}, 128.0, 128.0, False, rate, rate * 2, 1.0, rate * 3)
    return msgspec.structs.replace(Summary(concurrency, 0.0, *numbers, spread, spread, spread, spread), **changes)


def results_of(rates: dict[str, list[float]]) -> Results:
    """Results with one rate for each server and round."""
    paths = ModelPaths.below(Path("/out"))
    peers = peers_of(list(rates), "m.gguf", "Q4_1", paths, Programs(Path("/llama-server"), Path("/python")))
    loads = loads_of(["decode", "shared"], (8,))
    plan = Plan(peers, loads, (0.0,), 2.5, 2, 1, "/out")
    workload = Workload((8,), (0.0,), Length(1, "words"), Length(0, "words"), 2, 2.5, None, 1, 1, "chat", True)

    def report(concurrency: int, rate: float) -> BenchReport:
        return BenchReport("http://x", "model", "1", workload, [summary(concurrency, rate)])

    runs = [
        Run(name, number, 1.0, {"decode": report(8, rate), "shared": report(16, rate)}, [])
        for name, own in rates.items()
        for number, rate in enumerate(own)
    ]
    machine = Machine("Fast CPU", ("avx2",), "avx2", 2, 2**34, "Linux", "3.11")
    commit = Commit("0.1", "abcdef0123", True)
    where = Provenance(machine, commit, "2026-11-22T00:00:00+00:00", "m.gguf", "m.Q4_1.gguf", {}, [])
    return Results(plan, where, runs, [Failure("vllm", 0, "no")])


def test_ratios_are_to_the_server_with_the_same_weights() -> None:
    rates = {"pipeline": [300.0], "pipeline-int8": [450.0], "pipeline-bf16": [200.0], "llama.cpp": [150.0]}
    first = results_of(rates).rows[0]
    assert first.label == "output tok/s, 8, 0"
    assert first.values == {name: own[0] for name, own in rates.items()}
    assert first.ratios == {"pipeline": 2.0, "pipeline-int8": 3.0}
    rows = {row.label: row for row in results_of(rates | {"vllm": [100.0]}).rows}
    assert rows["output tok/s, 8, 0"].ratios["pipeline-bf16"] == 2.0
    assert rows["ITL p99, 8, 0"].values["vllm"] == 50.0
    assert rows["total tok/s, 16, 0"].values["vllm"] == 200.0


def test_a_server_without_a_figure_has_no_ratio() -> None:
    results = results_of({"pipeline": [300.0], "llama.cpp": [0.0]})
    assert results.rows[0].ratios == {"pipeline": None}
    assert "| output tok/s, 8, 0 | – |" in results.as_markdown()


def test_several_rounds_are_reported_by_their_medians() -> None:
    results = results_of({"pipeline": [100.0, 500.0, 200.0], "llama.cpp": [50.0, 60.0, 40.0]})
    assert results.rows[0].values == {"pipeline": 200.0, "llama.cpp": 50.0}
    assert results.rows[0].ratios == {"pipeline": 4.0}
    level = median_of(
        [
            summary(1, 10.0, num_errors=1, errors={"a": 1}),
            summary(1, 30.0, num_errors=3, errors={"a": 2, "b": 1}),
            summary(1, 20.0),
        ]
    )
    assert (level.output_tokens_per_s, level.itl_ms.p50, level.prefill_tokens_per_s) == (20.0, 2.0, 60.0)
    assert (level.num_errors, level.errors) == (4, {"a": 3, "b": 1})


def test_the_chart_and_the_tables_name_machine_commit_and_duration() -> None:
    results = results_of({"pipeline": [300.0], "llama.cpp": [150.0]})
    chart = results.chart()
    assert chart.title == "m.Q4_1: Pipeline and llama.cpp"
    assert chart.subtitle == (
        "2 cores of Fast CPU (avx2), 16 GiB; commit abcdef0 with changes, 2026-11-22; 2.5 s per measurement, medians "
        "of 2 rounds"
    )
    assert chart.series == ("Pipeline Q4_1", "llama.cpp Q4_1")
    markdown = results.as_markdown()
    assert chart.subtitle in markdown
    assert "| output tok/s, 8, 0 | 300 | 150 |" in markdown and "| output tok/s, 8, 0 | 2.00 |" in markdown
    tooltips = [one.text for one in ElementTree.fromstring(chart.as_svg()).iter("{http://www.w3.org/2000/svg}title")]
    assert "Pipeline Q4_1: 600 total tok/s" in tooltips
    assert "llama.cpp Q4_1, ITL p99, concurrent streams 8: 75.0 ms" in tooltips


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("a-q4_k_m.gguf", "Q4_K_M"),
        ("b.F16.gguf", "F16"),
        ("c.gguf", "GGUF"),
    ],
)
def test_labels_have_the_weights_format_of_the_file_name(name: str, weights: str) -> None:
    assert weights_of(Path(name)) == weights
