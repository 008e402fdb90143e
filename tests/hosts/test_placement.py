"""What the executor needs of a host, and the errors if none has it."""

import importlib.util
from typing import Any

import msgspec
import pytest

from pipeline.config.rules import contradictions
from pipeline.config.settings import ExecuteSettings, LoraSettings, RaySettings, Settings, TransportSettings
from pipeline.config.values import port_range
from pipeline.hosts import placement
from pipeline.runtime import topology


def settings_of(**execute: Any) -> Settings:
    return Settings(execute=ExecuteSettings(launcher="ray", **execute))


def test_ranks_need_a_gpu_each_or_a_cpu_each() -> None:
    assert placement.bundle_of(settings_of(tensor_parallel=2)) == {"CPU": 2.0}
    assert placement.bundle_of(settings_of(tensor_parallel=2, device="cuda")) == {"GPU": 2.0, "CPU": 2.0}
    more = msgspec.structs.replace(settings_of(), ray=RaySettings(bundle_cpus=6))
    assert placement.bundle_of(more) == {"CPU": 6.0}


@pytest.mark.parametrize(
    ("bundle", "nodes", "problem"),
    [
        ({"GPU": 2.0, "CPU": 2.0}, [{"GPU": 1.0, "CPU": 9.0}] * 2, "ray: no node has 2 free GPUs; nodes have 1, 1"),
        ({"CPU": 4.0}, [{"CPU": 2.0}, {}], "ray: no node has 4 free CPUs; nodes have 2, 0"),
        ({"CPU": 1.0}, [], "ray: no node has 1 free CPU; nodes have none"),
        ({"GPU": 1.0, "CPU": 2.0}, [{"GPU": 1.0}, {"CPU": 2.0}], "ray: no node has 1 free GPU and 2 free CPUs at once"),
        ({"CPU": 2.0}, [{"CPU": 1.0}, {"CPU": 2.0}], ""),
    ],
)
def test_the_error_says_what_the_nodes_have(bundle: dict[str, float], nodes: Any, problem: str) -> None:
    assert placement.problem_of(bundle, nodes) == problem


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = (
        "execute.launcher is 'ray', but ray is not installed: run `.venv/bin/pip install -e '.[ray]'` in the clone"
    )
    assert placement.why_not_installed() == expected
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert placement.why_not_installed() is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (settings_of(swap_bytes=1 << 20), "execute.swap_bytes: swap space can't be used with execute.launcher = 'ray'"),
        (
            msgspec.structs.replace(settings_of(), lora=LoraSettings(runtime_loading=True)),
            "lora.adapters: LoRA adapters can't be used with execute.launcher = 'ray'",
        ),
        (Settings(transport=TransportSettings(host="example.com")), "transport.host: must be an IP address"),
        (Settings(transport=TransportSettings(ports="9-8")), "transport.ports: needs ports from 1 to 65535"),
        (Settings(transport=TransportSettings(ports="many")), 'transport.ports: needs a range such as "40000-40100"'),
    ],
)
def test_what_can_not_work_is_refused_by_name(settings: Settings, key: str) -> None:
    assert [problem for problem in contradictions(settings) if problem.startswith(key)]


def test_ranges_of_ports() -> None:
    assert list(port_range.parse("")) == []
    assert list(port_range.parse("7")) == [7]
    assert list(port_range.parse("65533-65535")) == [65533, 65534, 65535]
    for wrong in ("0-3", "3-", "-3", "65536", "1-65536", "a-b"):
        with pytest.raises(ValueError, match="needs"):
            port_range.parse(wrong)


def test_only_the_executor_and_its_prepare_are_remote() -> None:
    settings = settings_of(tensor_parallel=2)
    names = [name for row in topology.TOPOLOGY for name in topology.replicas_of(settings, row.name)]
    assert [name for name in names if topology.is_remote(settings, name)] == ["execute.0", "execute.1"]
    assert topology.is_remote(settings, "prepare.1") and not topology.is_remote(settings, "prepare.0")
    assert not any("execute" in name for edge in topology.rings(settings) for name in edge)
    assert topology.num_hosts(settings) == 1 and topology.num_hosts(Settings()) == 0
    assert not any(topology.is_remote(Settings(), name) for name in names)
