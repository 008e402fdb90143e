"""A server's stats in Prometheus's text format. docs/observability.md explains each metric."""

from collections.abc import Iterator

from prometheus_client.core import Metric
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
    lines: list[str] = []
    for family in families_of(stats):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        lines += map(_line, family.samples)
    return "".join(lines).encode(errors="replace")  # half a character of a model's name is no reason to fail


def families_of(stats: ServerStats) -> Iterator[Metric]:
    """All metrics."""
    yield from vllm_metrics(stats)
    yield from server_metrics(stats)
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
