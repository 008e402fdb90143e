"""Requests of every kind over ZeroMQ, and what a Python client has received of each in the end."""

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from pipeline import LLM, AsyncClient, AsyncLLM, Client, SamplingParams, StructuredOutputsParams
from pipeline.client import protocol as p
from pipeline.client.connection.stream import Stream
from tests.e2e.recovery_streams import QUESTION, SCHEMA, STORY, TOOL
from tests.slices import part_of
from tests.zmq_requests import chat

PATIENCE_S = 120.0
MAX_TOKENS = 32 if os.environ.get("PIPELINE_ALL_KILLS") else part_of(32, 14)
"""With all kills, the last moment is behind 280 outputs."""
SAMPLED = SamplingParams(temperature=1, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True)
CALL = chat([p.MessageParam("user", "How is the weather in Oslo?")], tools=json.dumps([TOOL]), tool_choice="required")
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

    def __init__(self, client: AsyncClient, blocking: Client, llm: AsyncLLM, batch: LLM) -> None:
        self.client, self.blocking, self.llm, self.batch = client, blocking, llm, batch
        self.num_outputs = 0
        self.num_repeated = 0
        """Streams of `client` that a gateway received again, because their connection was lost."""
        self.on_output: Callable[[int], None] = lambda _: None

    async def run(self) -> dict[str, Any]:
        """By kind, what the client received."""
        self.num_outputs = self.num_repeated = 0
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = {kind: tasks.create_task(self.stream(*request)) for kind, request in REQUESTS.items()}
            running["embedding"] = tasks.create_task(self.embedding())
            running["AsyncLLM"] = tasks.create_task(self.complete(STORY, replace(SAMPLED, n=2, logprobs=2)))
            running["Client"] = tasks.create_task(asyncio.to_thread(self.read, STORY, replace(SAMPLED, seed=8)))
            running["LLM"] = tasks.create_task(asyncio.to_thread(self.complete_batch, replace(SAMPLED, seed=9)))
        return {kind: task.result() for kind, task in running.items()}

    async def stream(self, prompt: Any, params: SamplingParams) -> Any:
        stream = self.client.generate(prompt, params, timeout_s=PATIENCE_S)
        received = await all_of(stream, self._output)
        self.num_repeated += stream.is_repeated
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

    def read(self, prompt: Any, params: SamplingParams) -> Any:
        """With the blocking client."""
        stream = self.blocking.generate(prompt, params, timeout_s=PATIENCE_S)
        outputs = list(stream)
        for before, after in pairwise(outputs):
            assert after.text_offset == before.text_offset + len(before.text)
            assert after.token_offset == before.token_offset + len(before.token_ids)
        ids = [token_id for output in outputs for token_id in output.token_ids]
        return "".join(output.text for output in outputs), ids, outputs[-1].finish_reason

    def complete_batch(self, params: SamplingParams) -> Any:
        """With the blocking `LLM`."""
        outputs = self.batch.generate([STORY, f"{STORY} was"], params, progress=False, timeout_s=PATIENCE_S)
        return [output.outputs for output in outputs]

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


@asynccontextmanager
async def connected(address: str, api_key: str | None = None) -> AsyncIterator[Clients]:
    """One client of each kind, connected to the server with this address."""
    blocking = await asyncio.to_thread(Client, address, api_key=api_key)
    with blocking, await asyncio.to_thread(partial(LLM.attach, address, api_key=api_key)) as batch:
        async with (
            await AsyncClient.connect(address, api_key=api_key) as client,
            AsyncLLM.attach(address, api_key=api_key) as llm,
        ):
            yield Clients(client, blocking, llm, batch)


class Once:
    """Calls a function when this many outputs have come."""

    def __init__(self, moment: int, function: Callable[[], object]) -> None:
        self._moment, self._function = moment, function
        self.is_done = False

    def __call__(self, num_outputs: int) -> None:
        if num_outputs >= self._moment and not self.is_done:
            self.is_done = True
            self._function()
