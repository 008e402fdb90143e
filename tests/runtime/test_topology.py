"""Which transport an edge uses."""

import os
import platform

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import topology
from pipeline.shm.ring import POSITION_BYTES, RingWriter


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_edges_that_each_token_crosses_have_rings(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    senders_and_receivers = {(a.partition(".")[0], b.partition(".")[0]) for a, b in topology.rings(Settings())}
    assert senders_and_receivers == set(topology.RINGS)


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", ""])
def test_a_machine_of_unknown_memory_order_has_only_sockets(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert topology.rings(Settings()) == []


def test_a_full_ring_can_announce_as_many_messages_as_its_socket_takes() -> None:
    settings = Settings()
    num_bytes = topology.ring_bytes(settings)
    data, position = memoryview(bytearray(num_bytes)), memoryview(bytearray(POSITION_BYTES))
    event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    writer = RingWriter(data, position, event_fd, num_bytes - topology.RING_BYTES)
    while writer.put(bytes(1000)):
        pass
    assert writer.can_announce(topology.bound_of(settings))
    os.close(event_fd)
