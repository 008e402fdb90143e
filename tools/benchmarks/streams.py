"""Streams of completions that run while something happens to the server, and how long each of them waits."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from pipeline.errors import UserError

POLL_S = 0.002


class Stream:
    """A client that notes its text, and when each event came, by `time.perf_counter()`."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.text = ""

    async def run(self, session: aiohttp.ClientSession, prompt: str, max_tokens: int) -> None:
        """Read a greedy completion of this length. Raises UserError after an error of the server."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise UserError(f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event: dict[str, Any] = orjson.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise UserError(f"error in a stream: {event['error']}")
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    self.at_s.append(time.perf_counter())

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest gap between two events of which the later one is in a window."""
        return max((later - earlier for earlier, later in pairwise(self.at_s) if begin_s < later <= end_s), default=0.0)


def session_of(url: str, silent_s: float) -> aiohttp.ClientSession:
    """A session for any number of streams, which fail if nothing comes for `silent_s`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=silent_s)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def have_events(streams: Sequence[Stream], least: int) -> bool:
    """Whether each stream has at least so many events."""
    return all(len(one.at_s) >= least for one in streams)


async def until(condition: Callable[[], bool], running: "Sequence[asyncio.Task[None]]", limit_s: float) -> None:
    """Wait for a condition on streams. Raises UserError if it takes longer, or if one of the tasks ends, or the error
    of the task."""
    end_s = time.perf_counter() + limit_s
    while not condition():
        for task in running:
            if task.done():
                task.result()
                raise UserError("a stream ended early: lower --tokens or --rounds, or raise max_model_len")
        if time.perf_counter() > end_s:
            raise UserError(f"the streams did not go on within {limit_s:g} s")
        await asyncio.sleep(POLL_S)


async def cancel(running: "Sequence[asyncio.Task[None]]") -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
