"""`pipeline bench --plot`: throughput and latency over concurrency, for one result or several."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.options import Workload
from pipeline.cli.bench.plot.chart import Chart, Row
from pipeline.cli.bench.plot.panels import Line, LinePanel
from pipeline.cli.bench.report import BenchReport
from pipeline.config.load import ConfigError

CONCURRENCY = "concurrent streams"
STYLES = "solid: median, dashed: 99th percentile"


class NamedResult(msgspec.Struct, frozen=True):
    """The result of one server, and its name in the legend."""

    name: str
    report: BenchReport


def read_results(values: Sequence[str]) -> list[NamedResult]:
    """Read files that `pipeline bench --json` wrote. Each value is FILE or NAME=FILE; the name is by default the file's
    without its suffix. Raises ConfigError if a file can't be read, if a name is used twice, or if the results are of
    different requests."""
    found: list[NamedResult] = []
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or Path(value).is_file():  # a file's name may contain "="
            name, path = Path(value).stem, value
        if not name:
            raise ConfigError([f"{value}: needs a name before '='"])
        found.append(NamedResult(name, _read(Path(path))))
        if found[-1].report.workload.arrivals is not None:
            raise ConfigError([f"{path}: is of an open loop (--request-rate), and only closed ones are drawn"])
    names = [one.name for one in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"the name {name!r} is used twice: write NAME=FILE" for name in repeated])
    for one in found[1:]:
        if requests_of(one.report.workload) != requests_of(found[0].report.workload):
            raise ConfigError(
                [
                    f"{found[0].name} and {one.name} were measured with different requests: "
                    f"{requests_of(found[0].report.workload)}; {requests_of(one.report.workload)}"
                ]
            )
    return found


def _read(path: Path) -> BenchReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchReport)
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    except ValueError as error:  # also a name with a zero byte
        raise ConfigError([f"{path}: is not a result of `pipeline bench --json`: {error}"]) from error


def requests_of(workload: Workload) -> str:
    """The kind of requests in words."""
    shared = workload.shared_prefix
    prefix = f" ({shared.count} {shared.unit} shared)" if shared.count else ""
    eos = "" if workload.ignore_eos else ", ends at end-of-sequence tokens"
    prompt = f"{workload.prompt.count} {workload.prompt.unit} in{prefix}"
    return f"{prompt}, {workload.output_tokens} tokens out, {workload.endpoint}{eos}"


def chart_of(results: Sequence[NamedResult]) -> Chart:
    """A row of panels for each temperature. The results must not be empty, and must be of equal requests."""
    workload = results[0].report.workload
    models = " / ".join(dict.fromkeys(one.report.model for one in results))
    temperatures = sorted({level.temperature for one in results for level in one.report.levels})
    levels = [(one.name, one.report.levels) for one in results]
    return Chart(
        title=f"{models}: throughput and latency",
        subtitle=f"{requests_of(workload)}; {_extent(workload)}",
        series=tuple(one.name for one in results),
        rows=rows_of(levels, temperatures, is_prefill=workload.output_tokens == 1),
        note=STYLES,
    )


def rows_of(
    levels: Sequence[tuple[str, Sequence[Summary]]], temperatures: Sequence[float], is_prefill: bool = False
) -> tuple[Row, ...]:
    """A row of panels for each temperature: throughput, ITL and TTFT over concurrency. `levels` has the name and the
    levels of each series. Prompts with one token out (`is_prefill`) have prompt tokens/s, and no ITL. Levels without a
    finished request have no points; panels and rows without points are left out."""
    rows = []
    for temperature in temperatures:
        at = [(name, [one for one in own if one.temperature == temperature]) for name, own in levels]
        panels = [_throughput(at, is_prefill), _latency(at, "itl"), _latency(at, "ttft")]
        if drawn := tuple(panel for panel in panels if panel.lines):
            rows.append(Row(drawn, f"temperature {temperature:g}"))
    return tuple(rows)


def _throughput(levels: Sequence[tuple[str, Sequence[Summary]]], is_prefill: bool) -> LinePanel:
    field = "prefill_tokens_per_s" if is_prefill else "output_tokens_per_s"
    lines = []
    for i, (name, own) in enumerate(levels):
        points = {level.concurrency: float(getattr(level, field)) for level in own if getattr(level, field) > 0}
        if points:
            lines.append(Line(i, name, tuple(sorted(points.items()))))
    title = "Prefill throughput" if is_prefill else "Output throughput"
    return LinePanel(title, CONCURRENCY, "prompt tok/s" if is_prefill else "output tok/s", tuple(lines))


def _latency(levels: Sequence[tuple[str, Sequence[Summary]]], kind: str) -> LinePanel:
    lines = []
    for i, (name, own) in enumerate(levels):
        spreads: dict[int, Distribution] = {level.concurrency: getattr(level, f"{kind}_ms") for level in own}
        # A gap is 0 if two chunks arrive in one read. A logarithmic axis can't show it.
        for percentile in ("p50", "p99"):
            points = {
                count: float(getattr(spread, percentile))
                for count, spread in spreads.items()
                if getattr(spread, percentile) > 0
            }
            if points:
                words = f"{name}, {kind.upper()} {percentile}"
                lines.append(Line(i, words, tuple(sorted(points.items())), is_dashed=percentile == "p99"))
    title = {"itl": "Inter-token latency (ITL)", "ttft": "Time to first token (TTFT)"}[kind]
    return LinePanel(title, CONCURRENCY, "ms", tuple(lines), is_log=True)


def _extent(workload: Workload) -> str:
    if workload.num_requests is not None:
        return f"{workload.num_requests} requests at each concurrency"
    return f"{workload.duration_s:g} s at each concurrency"
