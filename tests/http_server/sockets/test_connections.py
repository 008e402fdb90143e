"""Idle connections make room for others if there are many; requests that are open never fail for that."""

import http.client
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.http_server.sockets import connections
from pipeline.http_server.sockets.connections import HttpConnections, limit_of
from pipeline.http_server.sockets.descriptors import SPARE
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.uploads.test_uploads import is_readable


class Fake:
    num_read = 0

    def __init__(self, address: str = "one", *, is_idle: bool = True) -> None:
        self.address = address
        self.is_idle = is_idle
        self.is_kept_alive = is_idle
        self.is_closed = False
        self.descriptor = -1

    def end(self) -> None:
        self.is_closed = True

    def hold(self) -> None:
        raise AssertionError("it sent little")

    go_on = hold


def test_idle_connections_of_the_address_with_most_end_first_and_the_most_silent_of_them() -> None:
    table = HttpConnections(4)
    first, *many, busy = [Fake(), Fake("many"), Fake("many"), Fake("many", is_idle=False)]
    for connection in (first, *many, busy):
        table.add(connection)
    table.heard(many[0])
    table.add(Fake("new"))
    assert [one.is_closed for one in (first, *many, busy)] == [False, False, True, False]
    table.remove(many[1])  # its transport closes later
    assert len(table) == 4
    table.add(Fake("new"))
    assert many[0].is_closed and not first.is_closed and not busy.is_closed


def test_a_connection_is_accepted_if_none_is_idle() -> None:
    table = HttpConnections(2)
    busy = [Fake(is_idle=False) for _ in range(3)]
    for connection in busy:
        table.add(connection)
    assert len(table) == 3 and not any(one.is_closed for one in busy)
    for connection in busy:
        table.remove(connection)
        table.remove(connection)
    assert len(table) == 0 and not table._num_of_address


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_flood_does_not_look_through_all_connections_for_each_new_one(is_strict: bool) -> None:
    now_s, num_looks = 10.0, 0

    class Busy(Fake):
        @property
        def is_idle(self) -> bool:
            nonlocal num_looks
            num_looks += 1
            return self.address == "idle"

        @is_idle.setter
        def is_idle(self, _: bool) -> None: ...

    table = HttpConnections(100, is_strict=is_strict, clock=lambda: now_s)
    for _ in range(99):
        table.add(Busy())
    table.add(last := Busy())
    for _ in range(100):
        if table.has_room():
            table.add(Busy())
    assert num_looks <= len(table)
    last.address = "idle"
    now_s += connections.SEARCH_INTERVAL_S
    assert table.has_room()
    table.add(Busy())
    assert last.is_closed


def test_every_sequence_can_have_a_connection_if_the_system_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "num_open", lambda: 100)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_000_000, 1_000_000))
    assert limit_of(100, 256) == connections.MAX_CONNECTIONS and limit_of(100_000, 256) == 400_000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert limit_of(100, 256) == 1024 - 256 - 100 - SPARE
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert limit_of(100, 256) == SPARE


def test_kept_and_silent_connections_end_when_others_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.stages.gateway.http.applications.limit_of", lambda *_: 4)
    with Gate(tmp_path) as gate, ExitStack() as stack:
        response = gate.post(CHAT)
        submit = gate.begin()  # a busy connection
        silent = [stack.enter_context(socket.create_connection(gate.address, PATIENCE_S)) for _ in range(2)]
        silent[1].sendall(b"GET /v1/mod")
        kept = http.client.HTTPConnection(*gate.address, timeout=PATIENCE_S)
        stack.callback(kept.close)
        kept.request("GET", "/v1/models")
        assert kept.getresponse().read()
        for _ in range(3):
            other = http.client.HTTPConnection(*gate.address, timeout=PATIENCE_S)
            stack.callback(other.close)
            other.request("GET", "/v1/models")
            assert other.getresponse().status == 200
        gate.rig.until(lambda _: all(map(is_readable, silent)))
        assert [one.recv(100) for one in silent] == [b"", b""]
        gate.finish(submit)
        assert response.result().status_code == 200
