"""A gateway without a free descriptor does not spin, says so once, and serves again."""

import logging
import os
import resource
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pipeline.http_server.sockets import descriptors
from tests.rig import PATIENCE_S
from tests.stages.gateway.crowd import open_gate

SPARE = 12
NUM_CLIENTS = 60
PINGS = 20


def test_a_full_table_of_descriptors(tmp_path: Path) -> None:
    with open_gate(tmp_path) as gate:
        process: psutil.Process = gate.rig.process  # type: ignore[attr-defined]
        before = process.rlimit(psutil.RLIMIT_NOFILE)
        kept = socket.create_connection(gate.address, timeout=PATIENCE_S)
        gate.rig.load()
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + SPARE, before[1]))
        clients = [socket.create_connection(gate.address, timeout=PATIENCE_S) for _ in range(NUM_CLIENTS)]
        num_closed = sum(is_closed(one) for one in clients[::-1][: NUM_CLIENTS - SPARE])
        assert num_closed > NUM_CLIENTS / 2, "connections without a descriptor are closed"
        used = [sum(process.cpu_times()[:2])]
        for _ in range(PINGS):  # while nothing happens, it computes nothing
            gate.rig.load()
            time.sleep(0.05)
            used.append(sum(process.cpu_times()[:2]))
        assert used[-1] - used[0] < 0.5 * PINGS * 0.05, "the accept loop spins"
        request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        kept.sendall(request)
        assert b"200 OK" in kept.recv(4096), "connections that it has are served"
        for one in (*clients, kept):
            one.close()
        process.rlimit(psutil.RLIMIT_NOFILE, before)
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert httpx.get(f"{gate.url}/version", timeout=PATIENCE_S).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < end_s


def is_closed(client: socket.socket) -> bool:
    """The server has closed the connection, or does within a moment."""
    client.settimeout(0.5)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_it_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1000.0
    watch = descriptors.DescriptorWatch(logging.getLogger("test"), lambda: now_s)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch.check()
    assert not caplog.records
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        for _ in range(3):
            watch.check()
        now_s += descriptors.REMIND_S
        watch.check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [record.getMessage()[:22] for record in caplog.records] == ["no descriptor is left,"] * 2
