"""Clients disconnect at any moment, and nothing of their requests remains."""

import asyncio
import random

import aiohttp

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"


async def _open_and_drop(session: aiohttp.ClientSession, server: Server, dice: random.Random, at_any_time: bool) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to a thousand. " * dice.randint(1, 60)}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "n": dice.choice([1, 1, 1, 2]),
    }
    num_chunks = dice.choice([0, 0, 1, 2, 5])
    # A third disconnects at a random time after sending its request, mostly before the first token.
    try:
        async with asyncio.timeout(dice.uniform(0.01, 1.0) if at_any_time else 120):
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for _ in response.content:
                    num_chunks -= 1
                    if num_chunks < 0:
                        return "dropped mid-stream"
    except TimeoutError:
        return "dropped by time"
    return "ended"


async def test_a_hundred_streams_dropped_at_random_points_leave_nothing_behind(server: Server) -> None:
    dice = random.Random(2024)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        outcomes = await asyncio.gather(
            *(_open_and_drop(session, server, dice, at_any_time=number % 3 == 0) for number in range(100))
        )
    assert outcomes.count("ended") == 0
    assert outcomes.count("dropped mid-stream") >= 66
    health = server.until_idle()
    assert health["status"] == "ok"
    assert health["kv_blocks"]["free"] + health["kv_blocks"]["cached"] == health["kv_blocks"]["total"]
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 4, "temperature": 0}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["text"].startswith(" five")
