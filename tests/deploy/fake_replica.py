"""A replica in this process: a small HTTP server that streams known tokens, with resume points, and dies when a test
wants it to. And an ingress in front of several."""

import asyncio
import base64
import json
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from pipeline.config.settings import GatewaySettings
from pipeline.deploy.health_checks import FixedReplicas
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.runtime.resume_points import RESUMABLE, RESUME
from pipeline.runtime.security.api_keys import Keys

HEAD = '{"id":"cmpl-1","created":1,"arrival_s":1.0,"seed":7,"salt":0,"prompt":""}'
PATIENCE_S = 20.0


def token(i: int) -> str:
    return f"t{i} "


def text_of(num: int) -> str:
    return "".join(map(token, range(num)))


class FakeReplica:
    """Answers /health, and completions of `num_tokens` tokens. What it does at each token can be set."""

    def __init__(self, num_tokens: int = 20) -> None:
        self.num_tokens = num_tokens
        self.health: tuple[int, Any] = 200, {"status": "ok", "kv_blocks": {"total": 100}}
        self.at: Callable[[int], str] = lambda _: ""
        """By token: "" goes on, "die" ends the connection, "tear" does so within an event, "without_point" before its
        point, or the code of a failure."""
        self.refuses: tuple[int, dict[str, Any] | bytes] | None = None
        self.has_points = True
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        """Requests: first line, headers, body."""
        self.open: set[asyncio.StreamWriter] = set()
        self.num_probes = 0
        self.hold: asyncio.Event | None = None
        self.padding = 0
        """Bytes of each event, besides its token."""
        self.slow_s: float | None = None
        """It ends the connection of a client that takes nothing for so long."""
        self.num_slow = 0
        """Connections that it has ended so."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ("127.0.0.1", 0)

    async def start(self) -> "FakeReplica":
        self._server = await asyncio.start_server(self._serve, *self.address)
        self.address = self._server.sockets[0].getsockname()[:2]
        return self

    async def stop(self) -> None:
        """As if the process was killed."""
        if self._server is not None:
            self._server.close()
        for writer in list(self.open):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_S)

    @property
    def name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if first.startswith("GET /health"):
                    self.num_probes += 1
                    status, answer = self.health
                    self._reply(writer, status, answer)
                    continue
                self.seen.append((first, headers, body))
                if self.refuses is not None:
                    self._reply(writer, *self.refuses)
                elif b'"stream": true' in body:
                    await self._stream(writer, headers, body)
                elif self.at(0) == "die":
                    writer.transport.abort()
                else:
                    if self.hold is not None:
                        await self.hold.wait()
                    self._reply(writer, 200, {"text": text_of(self.num_tokens)})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()

    def _reply(self, writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def _stream(self, writer: asyncio.StreamWriter, headers: dict[str, str], body: bytes) -> None:
        points = body[: int(headers.get(RESUME.lower(), 0))].decode()
        num = sum(
            len(base64.b64decode(ids)) // 4 for ids in re.findall(r"^: point \d+ \d+ \d (\S*)$", points, re.MULTILINE)
        )
        with_points = self.has_points and headers.get(RESUMABLE.lower()) == "1"
        extra = f"{RESUMABLE}: 1\r\n" if with_points else ""
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{extra}Transfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())

        def send(text: str) -> None:
            writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

        for i in range(num, self.num_tokens):
            what = self.at(i)
            more = {"more": "x" * self.padding} if self.padding else {}
            event = "data: " + json.dumps({"i": i, "text": token(i)} | more) + "\n\n"
            ids = base64.b64encode(struct.pack("<i", i)).decode()
            head_line = f": point {HEAD}\n" if i == 0 else ""
            point = f"{head_line}: point 0 {len(text_of(i + 1))} 0 {ids}\n\n" if with_points else ""
            if what == "die":
                writer.transport.abort()
                return
            if what == "tear":
                send(event[:-9])
            elif what == "without_point":
                send(event)
            elif what:
                send(f": point failed {what}\n\n" + 'data: {"error": {}}\n\ndata: [DONE]\n\n')
                break
            if what in ("tear", "without_point"):
                await writer.drain()
                writer.transport.abort()
                return
            send(event + point)
            if i % 3 == 0:
                try:
                    async with asyncio.timeout(self.slow_s):
                        await writer.drain()
                except TimeoutError:
                    self.num_slow += 1
                    writer.transport.abort()
                    return
                await asyncio.sleep(0)
            if self.hold is not None and i == self.num_tokens // 2:
                await self.hold.wait()
        else:
            send("data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def deployed(
    *replicas: FakeReplica, keys: Keys | None = None, gateway: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Ingress, aiohttp.ClientSession]]:
    """An ingress in front of these replicas, and a client of it. `gateway` are settings of its listener."""
    for replica in replicas:
        await replica.start()
    fixed = FixedReplicas([replica.address for replica in replicas], probe_s=0.05)
    ingress = Ingress(fixed, IngressSettings(gateway=GatewaySettings(port=0, **gateway or {}), **settings), keys)
    await ingress.start()
    await fixed.start(PATIENCE_S)
    try:
        async with aiohttp.ClientSession(ingress.url, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as client:
            yield ingress, client
    finally:
        await ingress.close()
        for replica in replicas:
            await replica.stop()
