"""A server's stats in Prometheus's text format. docs/observability.md explains each metric."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from pipeline.metrics.own_metrics import key_metrics, kind_metrics, server_metrics, stage_metrics
from pipeline.metrics.stats import ServerStats
from pipeline.metrics.vllm_metrics import vllm_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text_of(stats: ServerStats) -> bytes:
    """The body of GET /metrics.

    The same as the library's generate_latest (a test compares them), which takes several times as long and would block
    the gateway's loop.
    """
    return _text(families_of(stats))


def _text(families: Iterable[Metric]) -> bytes:
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        lines += map(_line, family.samples)
    return "".join(lines).encode(errors="replace")  # half a character of a model's name is no reason to fail


def text_of_models(of_models: Sequence[ServerStats], states: Mapping[str, str], turns: Mapping[str, int]) -> bytes:
    """The body of GET /metrics of several models: each sample has the label model_name. `states` are those of all
    models, and `turns` how often each was put to sleep for another one. What API keys have used is of the server: it
    is in the stats of each."""
    families: dict[str, Metric] = {}
    for index, stats in enumerate(of_models):
        for family in families_of(stats, with_keys=index == 0):
            merged = families.setdefault(family.name, family)
            for sample in family.samples:
                if sample.name.startswith("pipeline_key_"):
                    continue
                sample.labels.setdefault("model_name", stats.model)
            if merged is not family:
                merged.samples += family.samples
    state = GaugeMetricFamily("pipeline_model_state", "1 for the current state.", labels=["model_name", "state"])
    for name, value in states.items():
        state.add_metric([name, value], 1)
    words = "Times the model was put to sleep because another one was wanted."
    slept = CounterMetricFamily("pipeline_model_turns", words, labels=["model_name"])
    for name, number in turns.items():
        slept.add_metric([name], number)
    return _text([state, slept, *families.values()])


def families_of(stats: ServerStats, *, with_keys: bool = True) -> Iterator[Metric]:
    """All metrics, with those of API keys or without."""
    yield from vllm_metrics(stats)
    yield from server_metrics(stats)
    if with_keys:
        yield from key_metrics(stats)
    yield from stage_metrics(stats)
    yield from kind_metrics(stats)


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escaped(value)}"' for name, value in sample.labels.items()])
    return f"{sample.name}{{{labels}}} {sample.value}\n" if labels else f"{sample.name} {sample.value}\n"


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
