"""What a running server does with each setting that changes."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.cli.reload.command import line_of, summary
from pipeline.config.keys import sections
from pipeline.config.sections.keys import KeySettings
from pipeline.config.settings import Settings
from pipeline.supervisor.reconfigure.changed_settings import (
    ALL,
    KEYS,
    NEW_SERVER,
    RAISED,
    changes,
    stages_of,
    to_restart,
    to_scale,
)

ROOT = Path(__file__).resolve().parents[3]
TEXT = re.compile(r'"[^"]* limits\.[^"]*"')
"""Error messages may name a limit whose code is elsewhere."""
KNOWN = [key.dotted for section in sections() for key in section.keys]


def changed(dotted: str, value: Any, of: Settings | None = None) -> Settings:
    section, _, name = dotted.rpartition(".")
    settings = of or Settings()
    if not section:
        return msgspec.structs.replace(settings, **{name: value})
    return msgspec.structs.replace(
        settings, **{section: msgspec.structs.replace(getattr(settings, section), **{name: value})}
    )


@pytest.mark.parametrize("key", KNOWN)
def test_every_key_is_refused_with_a_reason_or_used_by_known_stages(key: str) -> None:
    if key not in NEW_SERVER:
        assert set(stages_of(key)) <= set(ALL)


@pytest.mark.parametrize("key", [key for key in KNOWN if key.startswith("limits.")])
def test_a_limit_restarts_the_stages_whose_code_reads_it(key: str) -> None:
    read = re.compile(rf"\b{key.removeprefix('limits.')}\b")
    readers = {
        stage
        for stage in ALL
        for path in (ROOT / "stages" / stage).rglob("*.py")
        if stage != "execute" or path.parent.name != "measuring"  # tools that set the limits themselves
        if any(read.search(TEXT.sub("", line)) for line in path.read_text().splitlines())
    }
    assert set(stages_of(key)) == readers


def test_the_tables_have_no_unknown_keys() -> None:
    assert {*KEYS, *NEW_SERVER, *RAISED} <= set(KNOWN)


def test_equal_settings_change_nothing() -> None:
    assert changes(Settings(), Settings()) == []
    assert summary([], is_dry_run=False) == "no setting has changed"


def test_a_setting_restarts_the_stages_that_use_it() -> None:
    after = changed("schedule.policy", "priority", changed("limits.max_n", 2))
    found = changes(Settings(), after)
    assert [(one.key, one.before, one.after, one.refusal) for one in found] == [
        ("schedule.policy", "fcfs", "priority", ""),
        ("limits.max_n", 128, 2, ""),
    ]
    assert to_restart(found) == ["schedule", "gateway"], "the gateway is the last"
    assert line_of(found[1]) == "limits.max_n: 128 → 2: restarts gateway"
    assert line_of(found[0]) == "schedule.policy: fcfs → priority: restarts schedule, gateway"
    assert to_restart(found[:1]) == ["schedule", "gateway"]
    assert summary(found[:1], is_dry_run=True) == "this would restart schedule, gateway"


def test_the_supervisor_s_own_settings_are_used_at_once() -> None:
    found = changes(Settings(), changed("supervisor.drain_timeout_s", 5.0))
    assert to_restart(found) == [] and not found[0].refusal
    assert line_of(found[0]) == "supervisor.drain_timeout_s: 30.0 → 5.0: used at once"
    assert summary(found, is_dry_run=False) == "changed; restarted no stage"


def test_another_limit_of_a_key_does_not_look_like_the_same_keys_again() -> None:
    keys = [changed("keys", (KeySettings("alice", "0" * 64, rpm=rpm),)) for rpm in (2, 100)]
    assert [line_of(one) for one in changes(*keys)] == ["keys: changed: used at once"]


def test_a_number_of_processes_adds_or_drains_some_and_restarts_none() -> None:
    before = changed("ingest.replicas", 4)
    after = changed("ingest.replicas", 1, changed("gateway.replicas", 2, before))
    found = changes(before, after)
    assert to_restart(found) == [] and not any(one.refusal for one in found)
    assert to_scale(found) == [("ingest", 1), ("gateway", 2)]
    assert [line_of(one) for one in found] == [
        "gateway.replicas: 1 → 2: adds 1 process",
        "ingest.replicas: 4 → 1: drains 3 processes",
    ]
    assert summary(found, is_dry_run=True) == "this would scale ingest, gateway"
    found += changes(Settings(), changed("schedule.policy", "priority"))
    assert summary(found, is_dry_run=False) == "changed; scaled ingest, gateway and restarted schedule, gateway"


def test_what_the_server_is_made_for_is_refused_with_the_reason() -> None:
    (found,) = changes(Settings(), changed("execute.kv_cache_bytes", 1 << 30))
    assert found.refusal == "the number of KV blocks is fixed" and not found.stages
    assert line_of(found).endswith("needs a new server: the number of KV blocks is fixed")


@pytest.mark.parametrize("key", RAISED)
def test_limits_that_size_the_queues_can_only_be_lowered(key: str) -> None:
    (lower,) = changes(Settings(), changed(key, 10))
    assert lower.stages == ("gateway",) and not lower.refusal
    (higher,) = changes(Settings(), changed(key, 1 << 40))
    assert "only be lowered" in higher.refusal
