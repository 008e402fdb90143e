"""However many connections send at the same time, one turn of the loop reads few of them."""

import asyncio
import http.client
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from pipeline.http_server.listener import HttpConnection
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.sockets import receive_turns
from pipeline.http_server.sockets.arrivals import Arrivals
from pipeline.http_server.sockets.connections import Connection, HttpConnections
from pipeline.http_server.sockets.receive_turns import NUM_READS, ReceiveTurns
from tests.http_server.listeners import LISTENERS, listener
from tests.rig import PATIENCE_S

NUM_UPLOADS = 24
BODY_BYTES = 1024**2
NUM_SILENT = 60


class Fake:
    """A connection that reads one byte in each turn."""

    num_read = 1

    def __init__(self, turns: ReceiveTurns, address: str = "one") -> None:
        self.address = address
        self._turns = turns
        self.num_turns = 0
        self.turns_of_all: list[Fake] | None = None
        self.here, self.there = socket.socketpair()
        self.descriptor = self.here.fileno()
        turns.wait(self)

    def go_on(self) -> None:
        self.num_turns += 1
        if self.turns_of_all is not None:
            self.turns_of_all.append(self)
        self.here.recv(1)
        self._turns.wait(self)
        self._turns.wait(self)  # idempotent

    def close(self) -> None:
        self._turns.remove(self)
        self._turns.remove(self)
        self.here.close()
        self.there.close()


@asynccontextmanager
async def fakes(num: int, others: int = 0) -> AsyncIterator[tuple[ReceiveTurns, list[Fake]]]:
    turns = ReceiveTurns()
    with ExitStack() as stack:
        found = [Fake(turns, "one" if i < num else "other") for i in range(num + others)]
        for one in found:
            stack.callback(one.close)
        yield turns, found
    assert not turns._known and not turns._watched and not turns._queue
    turns.close()


async def until(check: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():  # type: ignore[operator]
            await asyncio.sleep(0)


async def test_a_connection_that_has_sent_nothing_is_not_read() -> None:
    async with fakes(3) as (_, (silent, sending, gone)):
        sending.there.send(b"ab")
        gone.there.close()
        await until(lambda: sending.num_turns >= 2 and gone.num_turns)
        assert not silent.num_turns


async def test_a_few_are_read_in_each_turn_of_the_loop_and_addresses_alternate() -> None:
    async with fakes(3 * NUM_READS, others=1) as (_, many):
        order: list[Fake] = []
        for one in many:
            one.turns_of_all = order
            one.there.send(b"a")
        async with asyncio.timeout(PATIENCE_S):
            while len(order) < len(many):
                num_before = len(order)
                await asyncio.sleep(0)
                assert len(order) - num_before <= NUM_READS
        assert many[-1] in order[: NUM_READS + 1]


async def test_one_is_read_in_a_turn_of_the_loop_if_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over TLS, where bytes may be dear to decrypt."""
    seconds = itertools.count()
    monkeypatch.setattr(receive_turns, "time", SimpleNamespace(thread_time=lambda: float(next(seconds))))
    async with fakes(2 * NUM_READS) as (_, many):
        order: list[Fake] = []
        for one in many:
            one.turns_of_all = order
            one.there.send(b"a")
        async with asyncio.timeout(PATIENCE_S):
            while len(order) < len(many):
                num_before = len(order)
                await asyncio.sleep(0)
                assert len(order) - num_before <= 2  # what arrives is noticed in another part of the turn


async def test_one_that_sent_little_does_not_wait_for_those_of_its_address_that_sent_much() -> None:
    """Behind a proxy, all clients have one address."""
    async with fakes(4 * NUM_READS) as (_, many):
        order: list[Fake] = []
        for one in many:
            one.turns_of_all = order
            one.num_read = 256 * 1024 if one is not many[-1] else 200
            one.there.send(b"a")
        await until(lambda: len(order) >= NUM_READS)
        assert many[-1] in order[:NUM_READS]


async def test_a_descriptor_that_another_connection_has_now_stays_watched() -> None:
    async with fakes(1) as (turns, (first,)):
        first.here.close()
        second = Fake(turns)
        try:
            assert second.descriptor == first.descriptor
            turns.remove(first)
            second.there.send(b"a")
            await until(lambda: second.num_turns)
        finally:
            second.close()


@pytest.mark.parametrize("name", LISTENERS)
async def test_one_turn_of_the_loop_reads_few_of_many_connections(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is slow, so that all have sent when it reads: uploads, and connections that were silent, or kept after
    a request, before they all send at one moment. Few begin in a turn, too."""
    reads: dict[asyncio.AbstractEventLoop, list[int]] = {}
    begun: dict[asyncio.AbstractEventLoop, list[int]] = {}
    go_on, begin = HttpConnection.go_on, Arrivals.begin

    def count(found: dict[asyncio.AbstractEventLoop, list[int]], loop: asyncio.AbstractEventLoop) -> None:
        if loop not in reads:
            reads[loop], begun[loop] = [0], [0]
            loop.call_soon(next_turn, loop)
        found[loop][-1] += 1

    def next_turn(loop: asyncio.AbstractEventLoop) -> None:
        reads[loop].append(0)
        begun[loop].append(0)
        time.sleep(0.005)
        loop.call_soon(next_turn, loop)

    def counted(self: HttpConnection) -> None:
        count(reads, self._loop)
        go_on(self)

    def counted_begin(self: Arrivals, arrival: object) -> None:
        count(begun, self._loop)
        begin(self, arrival)  # type: ignore[arg-type]

    monkeypatch.setattr(HttpConnection, "go_on", counted)
    monkeypatch.setattr(Arrivals, "begin", counted_begin)
    async with listener(name, tmp_path, monkeypatch, keys=False) as one:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()

        def upload() -> None:
            with socket.create_connection(one.address, timeout=PATIENCE_S) as connection:
                connection.sendall(head + b" " * BODY_BYTES)
                assert connection.recv(5) == b"HTTP/"

        def burst(has_begun: bool) -> None:
            with ExitStack() as stack:
                silent = [http.client.HTTPConnection(*one.address, timeout=PATIENCE_S) for _ in range(NUM_SILENT)]
                for connection in silent:
                    stack.callback(connection.close)
                    connection.connect()
                for _ in range(1 + has_begun):
                    for connection in silent:
                        connection.request("GET", "/live")
                    for connection in silent:
                        connection.getresponse().read()

        with ThreadPoolExecutor(NUM_UPLOADS) as threads:
            run = asyncio.get_running_loop().run_in_executor
            await asyncio.gather(*(run(threads, upload) for _ in range(NUM_UPLOADS)))
            await run(threads, burst, False)
            await run(threads, burst, True)
    (turns,), (starts,) = reads.values(), begun.values()
    assert sum(turns) >= NUM_UPLOADS + 3 * NUM_SILENT and max(turns) <= 2 * NUM_READS, max(turns)
    assert sum(starts) == NUM_UPLOADS + 2 * NUM_SILENT and max(starts) <= NUM_READS, max(starts)


class FakeTransport:
    """Remembers whether it is read."""

    is_read = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False


class CountedConnections(HttpConnections):
    num_waits = 0

    def wait_turn(self, connection: Connection) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_turn_that_comes_while_aiohttp_has_paused_reading_is_not_lost(has_tls: bool) -> None:
    connections, loop = CountedConnections(), asyncio.get_running_loop()
    manager = web.Server(lambda _: pytest.fail())
    connection = HttpConnection(manager, connections, RejectionLog(logging.getLogger()), loop=loop)
    raw: Any = FakeTransport()
    connection.raw, connection.transport = raw, FakeTransport() if has_tls else raw  # type: ignore[assignment]
    connection.receive = raw.resume_reading
    connection.wait_turn()
    assert connections.num_waits == 1 and not raw.is_read
    connection._reading_paused = True
    connection.go_on()
    assert not raw.is_read
    connection._reading_paused = False
    connection._resume_transport_reading()
    if not raw.is_read:
        assert connections.num_waits == 2
        connection.go_on()
    assert raw.is_read
