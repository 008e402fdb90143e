"""However many connections send much at the same time, one turn of the loop reads little."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.http_server.listener import HttpConnection
from pipeline.http_server.receive_turns import MAX_SENDERS, MUCH_BYTES, NUM_READS, ReceiveTurns
from tests.http_server.listeners import LISTENERS, listener
from tests.rig import PATIENCE_S

NUM_UPLOADS = 24
BODY_BYTES = 1024**2


class Fake:
    def __init__(self, address: str = "one") -> None:
        self.address = address
        self.is_held = False

    def hold(self) -> None:
        assert not self.is_held
        self.is_held = True

    def go_on(self) -> None:
        assert self.is_held
        self.is_held = False


async def test_who_sends_much_waits_for_a_turn_and_who_sends_little_does_not() -> None:
    turns, much, little = ReceiveTurns(), Fake(), Fake()
    turns.heard(much, MUCH_BYTES)
    turns.heard(little, MUCH_BYTES - 1)
    assert much.is_held and not little.is_held
    await asyncio.sleep(0)
    assert not much.is_held


async def test_a_few_go_on_in_each_turn_and_addresses_alternate() -> None:
    turns = ReceiveTurns()
    many, other = [Fake("many") for _ in range(3 * NUM_READS)], Fake("other")
    for one in (*many, other):
        turns.heard(one, MUCH_BYTES)
    await asyncio.sleep(0)
    assert [one.is_held for one in many].count(False) == NUM_READS - 1 and not other.is_held
    for num in (2, 3):
        await asyncio.sleep(0)
        assert [one.is_held for one in many].count(False) == num * NUM_READS - 1


async def test_senders_that_wait_for_one_moment_are_held_together() -> None:
    turns = ReceiveTurns()
    many = [Fake() for _ in range(5 * NUM_READS)]
    for one in many:
        turns.heard(one, MUCH_BYTES)
    for _ in range(6):
        await asyncio.sleep(0)
    assert not any(one.is_held for one in many)
    for one in many[:NUM_READS]:
        turns.heard(one, MUCH_BYTES)
    assert all(one.is_held for one in many)  # the loop has events of the others already
    turns.remove(many[-1])
    for _ in range(6):
        await asyncio.sleep(0)
    assert [one.is_held for one in many] == [False] * (len(many) - 1) + [True]


async def test_connections_that_fell_silent_do_not_wait_in_front_of_those_that_send() -> None:
    turns = ReceiveTurns()
    silent, sending = [Fake() for _ in range(4 * MAX_SENDERS)], [Fake() for _ in range(NUM_READS)]
    for one in (*silent, *sending):
        turns.heard(one, MUCH_BYTES)
    while any(one.is_held for one in (*silent, *sending)):
        await asyncio.sleep(0)
    for one in sending:
        turns.heard(one, MUCH_BYTES)
    assert sum(one.is_held for one in silent) <= MAX_SENDERS
    for _ in range(MAX_SENDERS // NUM_READS + 1):
        await asyncio.sleep(0)
    assert not any(one.is_held for one in sending)


@pytest.mark.parametrize("name", LISTENERS)
async def test_one_turn_of_the_loop_reads_little_of_many_uploads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is slow, so that all of them have sent much when it reads."""
    reads: dict[asyncio.AbstractEventLoop, list[int]] = {}
    has_sent: set[HttpConnection] = set()
    """What a connection is going to send first is not known."""
    received = HttpConnection.data_received

    def count(self: HttpConnection, data: bytes) -> None:
        if self._loop not in reads:
            reads[self._loop] = [0]
            self._loop.call_soon(next_turn, self._loop)
        reads[self._loop][-1] += len(data) >= MUCH_BYTES and self in has_sent
        has_sent.add(self)
        received(self, data)

    def next_turn(loop: asyncio.AbstractEventLoop) -> None:
        reads[loop].append(0)
        time.sleep(0.005)
        loop.call_soon(next_turn, loop)

    monkeypatch.setattr(HttpConnection, "data_received", count)
    async with listener(name, tmp_path, monkeypatch, keys=False) as one:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()

        def upload() -> None:
            with socket.create_connection(one.address, timeout=PATIENCE_S) as connection:
                connection.sendall(head + b" " * BODY_BYTES)
                assert connection.recv(5) == b"HTTP/"

        with ThreadPoolExecutor(NUM_UPLOADS) as threads:
            run = asyncio.get_running_loop().run_in_executor
            await asyncio.gather(*(run(threads, upload) for _ in range(NUM_UPLOADS)))
    (turns,) = reads.values()
    assert sum(turns) >= NUM_UPLOADS and max(turns) <= NUM_READS, max(turns)
