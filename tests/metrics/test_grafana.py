"""docs/deploy/grafana.json against GET /metrics: each metric of its queries is there, with the labels that they use."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.metrics import exposition
from pipeline.metrics.stats import ExecuteCounts, KeyUsage
from tests.metrics.test_exposition import gateway, schedule, server, stage

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "deploy" / "grafana.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
METRIC = re.compile(r"((?:vllm:|pipeline_)[a-z0-9_]+)(?:\{([^}]*)\})?")
BY = re.compile(r"by \(([^)]*)\)")


def labels_by_name() -> dict[str, set[str]]:
    """The labels of each sample of a server whose stages have counted something."""
    execute = ExecuteCounts(1, 9, 90, 1.5, 0.5)
    stats = server(*map(stage, ("gateway.0", "schedule.0", "execute.0"), (gateway(1, 0.1), schedule(), execute)))
    stats.keys.append(KeyUsage("alice", 1, 2, 3, 4, num_rate_limited=1))
    text = exposition.text_of_models([stats], {"chat": "loaded"}, {"chat": 1}).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_metrics_that_there_are(panel: dict[str, Any]) -> None:
    known = labels_by_name()
    for target in panel["targets"]:
        used = METRIC.findall(target["expr"])
        assert used, target["expr"]
        for name, selector in used:
            assert name in known, name
            assert set(re.findall(r"(\w+)(?==~|!=|=)", selector)) <= known[name], (name, selector)
            grouped = {one.strip() for part in BY.findall(target["expr"]) for one in part.split(",")}
            assert grouped <= known[name], (name, grouped)
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= set.intersection(*(known[name] for name, _ in used))


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
