"""A key that sends many small requests at once does not delay another's."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.http_server.request_turns import NUM_REQUESTS, RequestTurns, another_turn
from tests.http_server.listeners import listener
from tests.rig import PATIENCE_S

NUM_FLOOD = 300


class Request:
    """One of a client that is not at a socket."""

    transport = None

    def __init__(self, name: str) -> None:
        self.name = name


async def test_few_requests_do_not_wait() -> None:
    turns, begun = RequestTurns(), list[str]()

    async def handle(request: Any) -> web.StreamResponse:
        begun.append(request.name)
        return web.Response()

    for _ in range(NUM_REQUESTS):  # without a turn of the loop in between
        with pytest.raises(StopIteration):
            turns.wrap(handle)(Request("a")).send(None)  # type: ignore[arg-type,attr-defined]
    assert len(begun) == NUM_REQUESTS
    await asyncio.ensure_future(turns.wrap(handle)(Request("a")))  # type: ignore[arg-type]
    assert len(begun) == NUM_REQUESTS + 1 and not turns._queue


async def test_a_client_that_leaves_gives_its_turn_to_the_next() -> None:
    turns, begun = RequestTurns(), list[str]()

    async def handle(request: Any) -> web.StreamResponse:
        begun.append(request.name)
        return web.Response()

    wrapped = turns.wrap(handle)
    tasks = [asyncio.ensure_future(wrapped(Request(str(i)))) for i in range(3 * NUM_REQUESTS)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for task in tasks[NUM_REQUESTS : 2 * NUM_REQUESTS]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    expected = [str(i) for i in (*range(NUM_REQUESTS), *range(2 * NUM_REQUESTS, 3 * NUM_REQUESTS))]
    assert begun == expected and not turns._queue


async def test_a_wait_that_ends_for_many_lets_few_of_them_go_on_in_a_turn_of_the_loop() -> None:
    turns, loop = RequestTurns(), asyncio.get_running_loop()
    answer, done, nums = loop.create_future(), list[str](), list[int]()

    async def handle(request: Any) -> web.StreamResponse:
        await answer
        await another_turn(request)
        done.append(request.name)
        return web.Response()

    def count() -> None:
        nums.append(len(done))
        if len(done) < NUM_FLOOD:
            loop.call_soon(count)

    wrapped = turns.wrap(handle)
    tasks = [asyncio.ensure_future(wrapped(Request(str(i)))) for i in range(NUM_FLOOD)]  # type: ignore[arg-type]
    while turns._queue:
        await asyncio.sleep(0)
    answer.set_result(None)
    count()
    await asyncio.gather(*tasks)
    count()
    assert len(done) == NUM_FLOOD and max(b - a for a, b in itertools.pairwise(nums)) <= NUM_REQUESTS


@pytest.mark.parametrize("name", ["gateway", "admin", "ingress"])
async def test_another_s_request_does_not_wait_for_a_flood_of_one_address(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them arrive in one turn of the loop."""
    order: list[str] = []
    wrap = RequestTurns.wrap

    def noted(self: RequestTurns, handle: Any) -> Any:
        async def note(request: web.BaseRequest) -> web.StreamResponse:
            order.append(request.headers["Client"])
            if request.headers["Client"] == "blocking":
                asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # the others arrive
            return await handle(request)

        return wrap(self, note)

    monkeypatch.setattr(RequestTurns, "wrap", noted)
    async with listener(name, tmp_path, monkeypatch, keys=False) as one:

        async def ask(client: str, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(*one.address, local_addr=(host, 0))

        flood = [await ask("flood", "127.0.0.1") for _ in range(NUM_FLOOD)]
        other = await ask("other", "127.0.0.2")
        blocking = await ask("blocking", "127.0.0.3")
        everyone = [(blocking, "blocking"), *((each, "flood") for each in flood), (other, "other")]
        for (_, writer), client in everyone:
            writer.write(b"GET /none HTTP/1.1\r\nHost: localhost\r\nClient: %b\r\n\r\n" % client.encode())
            if client == "blocking":
                await asyncio.sleep(0.1)
        async with asyncio.timeout(PATIENCE_S):
            for (reader, writer), _ in everyone:
                assert (await reader.readline()).startswith(b"HTTP/1.1 ")
                writer.close()
    assert order.count("flood") == NUM_FLOOD
    assert order.index("other") <= 3 * NUM_REQUESTS, order.index("other")
