"""The streams: each asks one model again and again, and compares each text with the one that was served alone."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp
import orjson

from pipeline.cli.bench.client import ServerError, message_of, reason_of
from tools.soak.clients import SUSPECTED
from tools.soak.turns.pauses import Wait

PROMPTS = [f"Once upon a time, number {index} of many" for index in range(4)]
SHORTEST_WAIT_S = 1.0
"""Shorter silences are not kept."""
MAX_FAULTS = 20


class Load:
    """Keeps `num_streams` streams open, spread over the models."""

    def __init__(self, url: str, num_tokens: dict[str, int], num_streams: int, seed: int) -> None:
        """`num_tokens` are those of each stream, by model."""
        self._url, self._num_tokens, self._num_streams, self._seed = url, num_tokens, num_streams, seed
        self._texts: dict[tuple[str, int], str] = {}
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.waits: list[Wait] = []

    async def serve_alone(self) -> None:
        """Note the text of each prompt, with nothing else open. Raises ServerError."""
        async with self._session() as session:
            for name in self._num_tokens:
                for index in range(len(PROMPTS)):
                    self._texts[name, index] = await self._text(session, name, index, None)

    async def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        names = list(self._num_tokens)
        async with self._session() as session, asyncio.TaskGroup() as group:
            for number in range(self._num_streams):
                group.create_task(self._stream(session, names[number % len(names)], number, end_s))

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=None), connector=connector)

    async def _stream(self, session: aiohttp.ClientSession, name: str, number: int, end_s: float) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while time.monotonic() < end_s:
            index = rng.randrange(len(PROMPTS))
            try:
                text = await self._text(session, name, index, self.waits)
            except ServerError as error:
                if SUSPECTED in str(error):
                    self.outcomes["suspected"] += 1
                else:
                    self._found(f"{name}: {error}")
                continue
            except (aiohttp.ClientError, OSError) as error:
                self._found(f"{name}: the connection broke: {reason_of(error)}")
                continue
            self.outcomes[name] += 1
            if text != self._texts[name, index]:
                self._found(f"{name}: the text of prompt {index} is another one than alone")

    async def _text(self, session: aiohttp.ClientSession, name: str, index: int, waits: "list[Wait] | None") -> str:
        """The text of a stream. Notes its silences, the one before its first event among them. Raises ServerError."""
        body = {
            "model": name,
            "prompt": PROMPTS[index],
            "max_tokens": self._num_tokens[name],
            "seed": index,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        text, reason, last_s = "", None, time.time()
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ServerError(f"{response.status}: {message_of(await response.read())}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[len(b"data: ") :])
                if event.get("error") is not None:
                    raise ServerError(f"error in the stream: {event['error']}")
                now_s = time.time()
                if waits is not None and now_s - last_s >= SHORTEST_WAIT_S:
                    waits.append(Wait(last_s, now_s, name))
                last_s = now_s
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
        if reason != "length":
            raise ServerError(f"the stream ended with finish_reason {reason}")
        return text

    def _found(self, fault: str) -> None:
        """Count a fault. The first of its kind is printed at once: a run that is stopped prints no summary."""
        self.faults[fault] += 1
        if self.faults[fault] == 1 and len(self.faults) <= MAX_FAULTS:
            print(f"FAULT: {fault}", flush=True)


def longest(waits: Sequence[Wait]) -> float:
    return max((one.seconds for one in waits), default=0.0)
