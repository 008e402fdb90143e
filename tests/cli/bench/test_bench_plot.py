"""`pipeline bench --plot`: charts of stored results, and of a run."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.__main__ import main
from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.options import Length, Workload
from pipeline.cli.bench.plot import scales
from pipeline.cli.bench.plot.chart import Chart, Row
from pipeline.cli.bench.plot.panels import Bar, BarPanel, Line, LinePanel, as_value
from pipeline.cli.bench.report import BenchReport
from pipeline.cli.json_output import as_json
from tests.cli.fake_server import FakeServer

SVG = "{http://www.w3.org/2000/svg}"


def level(concurrency: int, temperature: float = 0.0, rate: float = 100.0, **changes: Any) -> Summary:
    """A level whose latencies are derived from `rate`, so that each value occurs once in a chart."""
    itl = Distribution(50, rate / 7, rate / 8, rate / 4, rate / 2, rate)
    ttft = Distribution(50, rate * 2, rate * 3, rate * 4, rate * 5, rate * 6)
    numbers = (10.0, 50, 0, {}, 128.0, 64.0, False, rate, 2 * rate, 1.0, 9 * rate)
    found = Summary(concurrency, temperature, *numbers, ttft, itl, Distribution(), Distribution())
    return msgspec.structs.replace(found, **changes)


def workload(**changes: Any) -> Workload:
    base = Workload((1, 8), (0.0,), Length(128, "tokens"), Length(0, "tokens"), 64, 10.0, None, 1, 7, "chat", True)
    return msgspec.structs.replace(base, **changes)


def write(path: Path, levels: Sequence[Summary], model: str = "m", **changes: Any) -> Path:
    path.write_bytes(as_json(BenchReport("http://x", model, "1", workload(**changes), list(levels))))
    return path


def drawn(path: Path) -> ElementTree.Element:
    """The chart's root element. Fails if the file is not well-formed XML."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def tooltips(root: ElementTree.Element) -> list[str]:
    """The tooltips of all points and bars. The first title is the document's."""
    return [element.text or "" for element in root.iter(f"{SVG}title")][1:]


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run `pipeline bench` with wrong options. Returns its error, which must be one line."""
    try:
        code: Any = main(["bench", *options])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def test_every_series_and_value_of_the_results_is_in_the_chart(tmp_path: Path) -> None:
    ours = [level(1, 0.0, 111.0), level(8, 0.0, 444.0), level(1, 0.7, 222.0), level(8, 0.7, 333.0)]
    theirs = [level(1, 0.0, 55.0), level(4, 0.7, 66.0)]
    files = [write(tmp_path / "ours.json", ours), write(tmp_path / "b.json", theirs)]
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(files[0]), f"the <other>={files[1]}"]) == 0
    root = drawn(chart)
    expected = {
        f"{name}{kind}, concurrent streams {one.concurrency}: {as_value(value)} {unit}"
        for name, levels in (("ours", ours), ("the <other>", theirs))
        for one in levels
        for kind, value, unit in (
            ("", one.output_tokens_per_s, "output tok/s"),
            (", ITL p50", one.itl_ms.p50, "ms"),
            (", ITL p99", one.itl_ms.p99, "ms"),
            (", TTFT p50", one.ttft_ms.p50, "ms"),
            (", TTFT p99", one.ttft_ms.p99, "ms"),
        )
    }
    assert set(tooltips(root)) == expected
    assert len(tooltips(root)) == len(expected) == 6 * 5
    words = texts(root)
    assert {"ours", "the <other>", "temperature 0", "temperature 0.7"} < set(words)
    assert words.count("Output throughput") == words.count("Time to first token (TTFT)") == 2
    assert words.count("concurrent streams") == 6
    assert words.count("ms (logarithmic)") == 4
    assert words.count("output tok/s") == 2


def test_the_chart_names_the_model_and_its_requests(tmp_path: Path) -> None:
    changes = {"prompt": Length(650, "words"), "shared_prefix": Length(600, "words"), "duration_s": 2.5}
    result = write(
        tmp_path / "r.json", [level(16)], model="Qwen & Co", output_tokens=33, endpoint="completions", **changes
    )
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(result)]) == 0
    words = texts(drawn(chart))
    assert words[0] == "Qwen & Co: throughput and latency"
    assert words[1] == "650 words in (600 words shared), 33 tokens out, completions; 2.5 s at each concurrency"


def test_a_number_of_requests_is_named_instead_of_the_duration(tmp_path: Path) -> None:
    result = write(tmp_path / "r.json", [level(16)], num_requests=77, ignore_eos=False)
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(result)]) == 0
    words = texts(drawn(chart))[1]
    assert words.endswith("chat, ends at end-of-sequence tokens; 77 requests at each concurrency")


def test_prompts_with_one_token_out_show_prefill(tmp_path: Path) -> None:
    result = write(tmp_path / "r.json", [level(1, 0.0, 100.0, itl_ms=Distribution())], output_tokens=1)
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(result)]) == 0
    root = drawn(chart)
    assert "Prefill throughput" in texts(root) and "Inter-token latency (ITL)" not in texts(root)
    assert "r, concurrent streams 1: 900 prompt tok/s" in tooltips(root)


def test_a_level_without_finished_requests_has_no_points(tmp_path: Path) -> None:
    failed = level(8, 0.0, 0.0, ttft_ms=Distribution(), itl_ms=Distribution())
    result = write(tmp_path / "r.json", [level(1), failed, msgspec.structs.replace(failed, temperature=1.0)])
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(result)]) == 0
    root = drawn(chart)
    assert len(tooltips(root)) == 5 and all("streams 1:" in words for words in tooltips(root))
    assert "temperature 1" not in texts(root)


def test_a_run_is_drawn_as_it_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, results = tmp_path / "chart.SVG", tmp_path / "r.json"
    options = ["--concurrency=1,3", "--temperature=0.5", "--num-requests=3", "--prompt-words=5", "--output-tokens=4"]
    with FakeServer() as server:
        assert main(["bench", "--url", server.url, *options, "--plot", str(chart), "--json", str(results)]) == 0
    assert "TTFT p99" in capsys.readouterr().out
    root = drawn(chart)
    levels = msgspec.json.decode(results.read_bytes(), type=BenchReport).levels
    for one in levels:
        rate = as_value(one.output_tokens_per_s)
        assert f"fake, concurrent streams {one.concurrency}: {rate} output tok/s" in tooltips(root)
    assert "temperature 0.5" in texts(root)


def test_both_themes_have_a_background_and_text_colours(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(write(tmp_path / "r.json", [level(1)]))]) == 0
    style = drawn(chart).findtext(f"{SVG}style")
    assert style is not None
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for theme in (light, dark):
        assert re.search(r"\.background\{fill:#", theme) and re.search(r"\ntext\{fill:#", theme)
    assert light.count(".s0{") == dark.count(".s0{") == 1


@pytest.mark.parametrize("name", ["chart.png", "chart", "-"])
def test_only_svg_can_be_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--plot: needs a file name that ends in .svg, got {name!r}" in refused(capsys, "--plot", name)


def test_an_unwritable_chart_is_an_error_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no" / "chart.svg"
    with FakeServer() as server:
        error = refused(capsys, "--url", server.url, "--plot", str(path))
        assert server.bodies == []
    assert f"--plot {path}: can't be written: " in error


def test_results_that_cannot_be_drawn_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = str(tmp_path / "chart.svg")
    good = str(write(tmp_path / "good.json", [level(1)]))
    longer = str(write(tmp_path / "longer.json", [level(1)], output_tokens=99))
    broken = tmp_path / "broken.json"
    broken.write_text('{"url": 1}')

    assert "needs --plot" in refused(capsys, good)
    assert "the only other option is --plot" in refused(capsys, "--plot", chart, good, "--duration=3s")
    assert "missing.json: can't be read: No such file" in refused(capsys, "--plot", chart, "missing.json")
    assert "broken.json: is not a result of" in refused(capsys, "--plot", chart, str(broken))
    assert "the name 'good' is used twice" in refused(capsys, "--plot", chart, good, good)
    assert "needs a name before '='" in refused(capsys, "--plot", chart, f"={good}")
    different = refused(capsys, "--plot", chart, good, longer)
    assert "good and longer were measured with different requests" in different
    assert "64 tokens out" in different and "99 tokens out" in different
    assert not Path(chart).exists()


def test_a_file_name_may_contain_an_equals_sign(tmp_path: Path) -> None:
    result = write(tmp_path / "c=1.json", [level(1)])
    chart = tmp_path / "chart.svg"
    assert main(["bench", "--plot", str(chart), str(result)]) == 0
    assert "c=1" in texts(drawn(chart))


@given(st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=8))
def test_axes_contain_all_values_and_few_ticks(values: list[float]) -> None:
    for scale in (scales.from_zero(values), scales.logarithmic(values)):
        positions = [scale.position(value) for value in values]
        assert all(-1e-9 <= position <= 1 + 1e-9 for position in positions)
        assert 2 <= len(scale.ticks) <= 12
        assert list(scale.ticks) == sorted(set(scale.ticks))


def test_ticks_are_round_numbers() -> None:
    assert scales.from_zero([843.0]).ticks == (0, 250, 500, 750, 1000)
    assert scales.from_zero([]).ticks[0] == 0
    assert scales.logarithmic([4.0, 60.0]).ticks == pytest.approx((2, 5, 10, 20, 50, 100))
    assert scales.logarithmic([10.0]).ticks == (10, 20)
    wide = scales.logarithmic([0.2, 3e5]).ticks
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in wide)
    assert [scales.as_label(tick) for tick in (0.0, 0.25, 1000.0)] == ["0", "0.25", "1,000"]


def test_labels_of_close_counts_do_not_overlap() -> None:
    counts = (1, 100, 101, 102, 103)
    panel = LinePanel("t", "streams", "u", (Line(0, "a", tuple((count, 700.0) for count in counts)),))
    parts = panel.draw(0.0, 0.0, 320.0)
    labels = [part for part in parts if re.search(r">(1|10\d)</text>", part)]
    assert [re.sub(r".*>(\d+)</text>", r"\1", part) for part in labels] == ["1", "103"]


def test_bars_are_as_long_as_their_values() -> None:
    panel = BarPanel("Prefill", "tok/s", (Bar(0, "ours", 1200.0), Bar(1, "theirs", 300.0), Bar(2, "none", 0.0)))
    chart = Chart("t", "s", ("ours", "theirs", "none"), (Row((panel,)),))
    root = ElementTree.fromstring(chart.as_svg())
    bars = [one for one in root.iter(f"{SVG}rect") if "background" not in one.get("class", "")]
    widths = [float(one.get("width", "")) for one in bars]
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.01) and widths[2] <= 0.5
    assert tooltips(root) == ["ours: 1,200 tok/s", "theirs: 300 tok/s", "none: 0.0 tok/s"]
    assert {"1,200", "300", "Prefill (tok/s)"} < set(texts(root))


def test_the_legend_wraps_and_the_panels_follow_below() -> None:
    names = tuple(f"a server with a long name, number {i}" for i in range(9))
    panel = LinePanel("t", "x", "u", tuple(Line(i, name, ((1, 1.0), (2, 2.0))) for i, name in enumerate(names)))
    root = ElementTree.fromstring(Chart("t", "s", names, (Row((panel,)),), note="a note").as_svg())
    positions = {one.text: (float(one.get("x", "")), float(one.get("y", ""))) for one in root.iter(f"{SVG}text")}
    assert all(positions[name][0] < 1040 for name in names)
    assert positions[names[0]][1] < positions[names[-1]][1] <= positions["a note"][1] < positions["x"][1]
    assert float(root.get("height", "")) > positions["x"][1]
