"""Clients of a server with the OpenAI API, and the CPU time of its processes."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import orjson
import psutil

from tools.compare_encoders.texts import Texts

REQUEST_S = 120.0


class Load(NamedTuple):
    """What clients measured: CPU seconds of all the server's processes for each request and for each token, requests a
    second, and the vectors of the first texts."""

    cpu_s: float
    token_cpu_s: float
    per_s: float
    vectors: list[list[float]]


def cpu_time_s(pid: int) -> float:
    """Of a process and its children."""
    parent = psutil.Process(pid)
    found = 0.0
    for process in (parent, *parent.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found += times.user + times.system
    return found


async def _embed(session: aiohttp.ClientSession, url: str, model: str, texts: Sequence[str]) -> list[list[float]]:
    async with session.post(f"{url}/v1/embeddings", json={"model": model, "input": list(texts)}) as reply:
        body = await reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{url}: {reply.status} {body[:300]!r}")
    data = sorted(orjson.loads(body)["data"], key=lambda one: int(one["index"]))
    return [one["embedding"] for one in data]


async def load(
    url: str, pid: int, model: str, texts: Texts, clients: int, inputs: int, warm_s: float, seconds: float
) -> Load:
    """`clients` at a time send requests of `inputs` texts each for some seconds, of which the first don't count."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        vectors = await _embed(session, url, model, texts.texts[:8])
        begun_s, cpu_s, num, num_tokens, following = 0.0, 0.0, 0, 0, 0
        end_s = time.monotonic() + warm_s + seconds

        async def client() -> None:
            nonlocal num, num_tokens, following
            while time.monotonic() < end_s:
                chosen = [(following + i) % len(texts.texts) for i in range(inputs)]
                following += inputs
                await _embed(session, url, model, [texts.texts[i] for i in chosen])
                num += 1
                num_tokens += sum(texts.num_tokens[i] for i in chosen)

        async def watch() -> None:
            nonlocal begun_s, cpu_s, num, num_tokens
            await asyncio.sleep(warm_s)
            begun_s, cpu_s, num, num_tokens = time.monotonic(), cpu_time_s(pid), 0, 0

        await asyncio.gather(watch(), *(client() for _ in range(clients)))
        took_s, used_s = time.monotonic() - begun_s, cpu_time_s(pid) - cpu_s
    return Load(used_s / num, used_s / num_tokens, num / took_s, vectors)
