"""A gateway dies, or the whole server is started again, while Python clients have requests of every kind open: each
receives exactly what it would have received."""

import asyncio
import json
import os
import signal
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from pipeline import LLM, AsyncClient, AsyncLLM, SamplingParams, StructuredOutputsParams
from pipeline.client import protocol as p
from pipeline.client.connection.stream import Stream
from tests.e2e.conftest import tiny
from tests.e2e.recovery_streams import QUESTION, SCHEMA, STORY, TOOL
from tests.e2e.server import Server

PATIENCE_S = 60.0
SAMPLED = SamplingParams(temperature=1, seed=7, max_tokens=32, ignore_eos=True)
CALL = p.ChatPrompt(
    [p.ChatMessage("user", "How is the weather in Oslo?")], tools=json.dumps([TOOL]), tool_choice="required"
)
REQUESTS: dict[str, tuple[Any, SamplingParams]] = {
    "greedy": (STORY, replace(SAMPLED, temperature=0)),
    "seeded": (STORY, SAMPLED),
    "unseeded": (STORY, replace(SAMPLED, seed=None)),
    "chat": (QUESTION, SAMPLED),
    "penalties": (STORY, replace(SAMPLED, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)),
    "stop string": (STORY, replace(SAMPLED, temperature=0, stop=["fish", " sea ", " an"], min_tokens=8)),
    "n = 3": (STORY, replace(SAMPLED, n=3, ignore_eos=False)),
    "logprobs": (QUESTION, replace(SAMPLED, logprobs=3)),
    "logprob_token_ids": (STORY, replace(SAMPLED, logprob_token_ids=[28, 216])),
    "prompt_logprobs": (STORY, replace(SAMPLED, n=2, logprobs=1, prompt_logprobs=2)),
    "JSON schema": (
        QUESTION,
        replace(SAMPLED, ignore_eos=False, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    ),
    "tool call": (CALL, replace(SAMPLED, ignore_eos=False)),
    "best_of": (STORY, replace(SAMPLED, best_of=3)),
    "truncated": ("word " * 90 + STORY, replace(SAMPLED, truncate_prompt_tokens=20)),
}


class Clients:
    """Makes all requests at once. `on_output` is called with the number of outputs so far."""

    def __init__(self, client: AsyncClient, llm: AsyncLLM) -> None:
        self.client, self.llm = client, llm
        self.num_outputs = 0
        self.on_output: Callable[[int], None] = lambda _: None

    async def run(self) -> dict[str, Any]:
        """By kind, what the client received."""
        self.num_outputs = 0
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = {kind: tasks.create_task(self.stream(*request)) for kind, request in REQUESTS.items()}
            running["embedding"] = tasks.create_task(self.embedding())
            running["AsyncLLM"] = tasks.create_task(self.complete(STORY, replace(SAMPLED, n=2, logprobs=2)))
        return {kind: task.result() for kind, task in running.items()}

    async def stream(self, prompt: Any, params: SamplingParams) -> Any:
        stream = self.client.generate(prompt, params, timeout_s=PATIENCE_S)
        received = await all_of(stream, self._output)
        assert stream.num_prompt_tokens == len(stream.prompt_token_ids or ())
        if params.seed is None:  # the server's seed gives the same output
            assert stream.seed is not None
            again = self.client.generate(prompt, replace(params, seed=stream.seed))
            assert received == await all_of(again, lambda: None)
            return None
        return received, stream.prompt_token_ids, stream.prompt_logprobs

    async def embedding(self) -> list[float]:
        vectors = [self.client.embed(f"{STORY} {i}").embedded() for i in range(3)]
        return [float(number) for vector in await asyncio.gather(*vectors) for number in vector]

    async def complete(self, prompt: Any, params: SamplingParams) -> Any:
        outputs = []
        async for output in self.llm.generate(prompt, params):
            self._output()
            outputs.append(output)
        for before, after in pairwise(outputs):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
        return outputs[-1].outputs

    def _output(self) -> None:
        self.num_outputs += 1
        self.on_output(self.num_outputs)


async def all_of(stream: Stream, on_output: Callable[[], None]) -> dict[int, dict[str, Any]]:
    """By sequence, everything received. Checks that nothing is repeated or missing."""
    received: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "ids": [], "logprobs": [], "finish": None})
    async for output in stream:
        on_output()
        one = received[output.index]
        assert one["finish"] is None, "output after the end"
        assert (output.text_offset, output.token_offset) == (len(one["text"]), len(one["ids"]))
        one["text"] += output.text
        one["ids"] += output.token_ids
        one["logprobs"] += output.logprobs or []
        assert output.logprobs is None or len(one["logprobs"]) == len(one["ids"])
        if output.finish_reason is not None:
            one["finish"] = output.finish_reason, output.stop_reason
    return dict(received)


def pid_of_gateway(server: Server) -> int:
    (found,) = [one["pid"] for one in server.health()["stages"] if one["name"] == "gateway.0"]
    return int(found)


@pytest.mark.parametrize("moment", [1, 150])
async def test_streams_outlive_their_gateway(place: "Place", moment: int) -> None:
    async with place.clients() as clients:
        expected = await place.expected(clients)
        pid = await asyncio.to_thread(pid_of_gateway, place.server)
        once = Once(moment, lambda: os.kill(pid, signal.SIGKILL))
        clients.on_output = once
        received = await clients.run()
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        for kind, value in expected.items():
            assert received[kind] == value, kind
        assert clients.client.is_connected
    assert await asyncio.to_thread(pid_of_gateway, place.server) != pid
    place.server.look()
    await asyncio.to_thread(place.server.until_idle)


async def test_streams_outlive_their_server(place: "Place") -> None:
    """It ends them, and is started again at its address."""
    async with place.clients() as clients:
        expected = await place.expected(clients)
        restarted: list[asyncio.Task[None]] = []
        once = Once(60, lambda: restarted.append(asyncio.create_task(asyncio.to_thread(place.restart))))
        clients.on_output = once
        received = await clients.run()
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        await restarted[0]
    for kind, value in expected.items():
        assert received[kind] == value, kind


def test_a_batch_outlives_the_gateway_of_its_own_server(tiny_model: Path) -> None:
    with LLM(**tiny(tiny_model)) as llm:
        assert llm.server is not None
        params = SamplingParams(temperature=1, seed=3, max_tokens=100, ignore_eos=True)
        (gateway,) = [
            one for one in psutil.Process(llm.server.pid).children() if one.cmdline()[0] == "pipeline: gateway.0"
        ]
        (expected,) = llm.generate("Once", params)

        def prompts() -> Iterator[str]:
            yield from ["Once"] * 8
            gateway.kill()
            yield from ["Once"] * 8

        outputs = llm.generate(prompts(), params)
        assert [output.outputs for output in outputs] == [expected.outputs] * 16
        gateway.wait(0)


class Once:
    """Calls a function when this many outputs have come."""

    def __init__(self, moment: int, function: Callable[[], object]) -> None:
        self._moment, self._function = moment, function
        self.is_done = False

    def __call__(self, num_outputs: int) -> None:
        if num_outputs >= self._moment and not self.is_done:
            self.is_done = True
            self._function()


class Place:
    """A server at an address of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as one:
            self._address = f"tcp://127.0.0.1:{one.getsockname()[1]}"
        self.server = self._started()
        self._expected: dict[str, Any] = {}

    def _started(self) -> Server:
        return Server(f"gateway.zmq={self._address}", "supervisor.max_restarts=100", "supervisor.drain_timeout_s=0.1")

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[Clients]:
        async with await AsyncClient.connect(self._address) as client, AsyncLLM.attach(self._address) as llm:
            yield Clients(client, llm)

    async def expected(self, clients: Clients) -> dict[str, Any]:
        """The undisturbed run."""
        self._expected = self._expected or await clients.run()
        return self._expected

    def restart(self) -> None:
        self.server.__exit__()
        self.server = self._started()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.server.__exit__()
