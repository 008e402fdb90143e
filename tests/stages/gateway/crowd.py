"""Many streaming clients of a gateway in its own process; the test plays the other stages."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from pipeline.runtime import messages as m
from pipeline.supervisor.processes.process import ChildProcess
from tests.rig import PATIENCE_S, Rig
from tests.stages.gateway.gate import CHAT, END, Gate

SLOW_READ_S = 1.0
"""Interval at which a slow client reads one byte."""
SEND_BUFFER_BYTES = 16 * 1024
"""Kernel send buffer of each connection of the gateway: small, so that a slow client fills it soon."""
STEPS_AHEAD = 4
"""Steps that may be in flight to fast clients."""
DEADLINE_S = 240.0


class ProcessRig(Rig):
    """Runs the stage in a process, as the supervisor does; the thread waits for it to exit."""

    def _run(self) -> None:
        self.child = ChildProcess(self.launch, 1)
        os.close(self.launch.listen_fd)
        self.is_spawned.set()
        try:
            if not self.child.wait(DEADLINE_S) or self.child.exit_code:
                self._error = AssertionError(f"the gateway {self.child.describe_end()}")
        finally:
            self.child.close()

    def __enter__(self) -> "ProcessRig":
        self.is_spawned = threading.Event()
        super().__enter__()
        assert self.is_spawned.wait(PATIENCE_S)
        self.process = psutil.Process(self.child.pid)
        return self


class Result(msgspec.Struct):
    """Measurements of one crowd."""

    fast_s: list[float]
    """Time from the first token to the complete response, for each fast client."""
    num_behind: int
    """Slow clients whose responses were incomplete when the others had finished."""
    rss_bytes: int
    num_fds: int
    """File descriptors of the gateway when it was idle again."""


@contextlib.contextmanager
def open_gate(folder: Path, **gateway: Any) -> Iterator[Gate]:
    """A gateway in a process, with small send buffers."""
    gate = Gate(folder, rig=ProcessRig, send_buffer_bytes=SEND_BUFFER_BYTES, **gateway)
    with gate:
        yield gate


def serve_crowd(gate: Gate, num_streams: int, num_slow: int, num_steps: int, num_chars: int) -> Result:
    """Serve `num_streams` concurrent streams, of which the first `num_slow` read a byte a second: `num_steps` steps of
    one token with `num_chars` characters. At the end the slow clients disconnect."""
    process = gate.rig.process  # type: ignore[attr-defined]
    clients = _Clients(gate.address, num_streams, num_slow)
    try:
        submits = [gate.submit() for _ in range(num_streams)]
        for submit in submits:
            gate.accept(submit)
        text = "x" * num_chars
        clients.begun_s = time.monotonic()
        num_fast = num_streams - num_slow
        for step in range(num_steps):
            # Like an engine, no faster than the fast clients: otherwise their backlog hides all other effects.
            while clients.num_chars < (step - STEPS_AHEAD) * num_chars * num_fast:
                gate.rig.load()
                assert time.monotonic() < clients.begun_s + DEADLINE_S, "fast clients are delayed"
            gate.rig.send(_step(submits, step, text, is_last=step == num_steps - 1), "detokenize.0")
            gate.rig.load()  # processed: data in sockets would count as memory of slow clients
        fast_s = clients.fast_s()
        num_behind = gate.rig.load().num_open_requests
        rss_bytes = process.memory_info().rss
    finally:
        clients.close()
    while gate.rig.load().num_open_requests:
        assert time.monotonic() < clients.begun_s + DEADLINE_S, "requests of disconnected clients stay open"
    return Result(fast_s, num_behind, rss_bytes, _num_fds_when_settled(process))


def _num_fds_when_settled(process: psutil.Process) -> int:
    """The number of file descriptors once it is stable: connections close a little after their requests."""
    end = time.monotonic() + PATIENCE_S
    while any(c.status != psutil.CONN_LISTEN for c in process.net_connections("tcp")):
        assert time.monotonic() < end, "connections of disconnected clients stay open"
        time.sleep(0.05)
    num_fds: int = process.num_fds()
    return num_fds


def _step(submits: list[m.Submit], step: int, text: str, is_last: bool) -> m.Deltas:
    """The message that detokenize sends for a step of all sequences."""
    num = len(submits)
    return m.Deltas(
        [submit.request_id for submit in submits],
        [1] * num,
        [0] * num,
        [text] * num,
        [step * len(text)] * num,
        np.full(num, step, np.int32).tobytes(),
        [step] * num,
        [1] * num,
        [int(m.Finish.LENGTH if is_last else m.Finish.NONE)] * num,
        [None] * num,
    )


class _Clients:
    """The clients, in a thread with its own event loop."""

    def __init__(self, address: tuple[str, int], num_streams: int, num_slow: int) -> None:
        self.begun_s = time.monotonic()
        self.num_chars = 0
        """Received so far by all fast clients."""
        self._address = address
        self._num = num_streams, num_slow
        self._fast: Future[list[float]] = Future()
        self._loop = asyncio.new_event_loop()
        self._leave = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True)
        self._thread.start()

    def fast_s(self) -> list[float]:
        """Wait for the fast clients. Returns when each finished, sorted."""
        return sorted(end - self.begun_s for end in self._fast.result(DEADLINE_S))

    def close(self) -> None:
        """Disconnect all."""
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _run(self) -> None:
        num_streams, num_slow = self._num
        slow = [asyncio.create_task(self._read_slowly()) for _ in range(num_slow)]
        fast = [asyncio.create_task(self._read()) for _ in range(num_streams - num_slow)]
        leaving = asyncio.create_task(self._leave.wait())
        everybody = asyncio.gather(*fast)
        ends: list[asyncio.Future[Any]] = [everybody, leaving]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if everybody.done():
            if error := everybody.exception():
                self._fast.set_exception(error)
            else:
                self._fast.set_result(everybody.result())
        await leaving
        for task in (*slow, *fast):
            task.cancel()
        await asyncio.gather(*slow, *fast, everybody, return_exceptions=True)

    async def _connect(self, receive_buffer_bytes: int = 0) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        content = json.dumps(CHAT | {"stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        await self._loop.sock_connect(connection, self._address)
        await self._loop.sock_sendall(connection, head.encode() + content)
        return connection

    async def _read(self) -> float:
        with await self._connect() as connection:
            tail, data = b"", b""
            while not (tail + data).endswith(END):
                tail = (tail + data)[-len(END) :]
                data = await self._loop.sock_recv(connection, 65536)
                assert data, "a stream ended early"
                self.num_chars += data.count(b"x")
            return time.monotonic()

    async def _read_slowly(self) -> None:
        with await self._connect(receive_buffer_bytes=2048) as connection:
            while await self._loop.sock_recv(connection, 1):
                await asyncio.sleep(SLOW_READ_S)
