"""Metrics of replicas, whose labels may have any character."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pipeline.deploy import exposition
from pipeline.metrics.exposition import text_of
from tests.metrics.test_exposition import schedule, server, stage

NAMES = [f"a{chr(code)}b" for code in (*range(1, 32), 34, 92, *range(127, 160), 0x2028, 0x2029, 0x202E, 0xFEFF)]
"""Names of models: all controls, quotes, backslashes and separators."""


def test_any_model_name_stays_one_label() -> None:
    plain = server(stage("schedule", schedule()))
    num_lines = len(text_of(plain).split(b"\n"))
    for name in NAMES:
        text = text_of(msgspec.structs.replace(plain, model=name)).decode()
        assert len(text.split("\n")) == num_lines
        joined = exposition.of_replicas({"r:1": text})
        samples = [one for family in text_string_to_metric_families(joined) for one in family.samples]
        assert samples and all(one.labels["replica"] == "r:1" for one in samples)
        named = [one.labels["model_name"] for one in samples if "model_name" in one.labels]
        assert named and set(named) == {name}


def test_half_a_character_does_not_fail_the_metrics() -> None:
    assert b"a?b" in text_of(msgspec.structs.replace(server(stage("schedule", schedule())), model="a\ud800b"))
