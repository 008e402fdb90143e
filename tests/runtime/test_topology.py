"""Which transport an edge uses."""

import platform

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import topology


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_edges_that_each_token_crosses_have_rings(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    senders_and_receivers = {(a.partition(".")[0], b.partition(".")[0]) for a, b in topology.rings(Settings())}
    assert senders_and_receivers == set(topology.RINGS)


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", ""])
def test_a_machine_of_unknown_memory_order_has_only_sockets(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert topology.rings(Settings()) == []
