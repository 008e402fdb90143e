"""The ZeroMQ interface of the real server, with the real model."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from pipeline.client.blocking_client import Client
from pipeline.client.client import AsyncClient
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from tests.e2e.server import Server
from tests.slices import ALL_CASES
from tests.stages.gateway.http.access.test_guard import free_port

MODEL = "SmolLM2-135M-Instruct"
PATIENCE_S = 120.0
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=2**64 - 59, max_tokens=24)
STORY = "Once upon a time"
STRIDE = 1 if ALL_CASES else 3
"""Streams are cut behind each such number of ids. tests/stages/detokenize cuts texts everywhere."""
QUESTION: Any = [{"role": "user", "content": "Name three colours, with an emoji each."}]


async def all_of(stream: Stream) -> list[OutputDelta]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def text_and_ids(stream: Stream) -> tuple[str, list[int], str | None, str | int | None]:
    outputs = await all_of(stream)
    ids = [token_id for output in outputs for token_id in output.token_ids]
    return "".join(output.text for output in outputs), ids, outputs[-1].finish_reason, outputs[-1].stop_reason


async def test_zmq_returns_the_same_text_as_http(server: Server) -> None:
    http = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    async with http, await AsyncClient.connect(server.zmq) as client:
        assert client.info.model == MODEL
        params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 77, "max_tokens": 24, "stop": ["\n\n\n"]}
        for _ in range(2):  # the second time both find the same prefix
            reply = await http.chat.completions.create(model=MODEL, messages=QUESTION, **params)
            stream = client.generate(QUESTION, SamplingParams(**params))
            text, ids, finish, _ = await text_and_ids(stream)
        assert text == reply.choices[0].message.content
        assert finish == reply.choices[0].finish_reason and reply.usage is not None
        assert (stream.num_prompt_tokens, len(ids)) == (reply.usage.prompt_tokens, reply.usage.completion_tokens)
        assert stream.prompt_token_ids is not None
        # The prompt's ids as the server reported them give the same output.
        assert (await text_and_ids(client.generate(stream.prompt_token_ids, SamplingParams(**params))))[0] == text
        with pytest.raises(RequestError) as raised:
            await all_of(client.generate("word " * 20_000))
        assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")


async def test_http_and_zmq_run_concurrently(server: Server) -> None:
    http = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    async with http, await AsyncClient.connect(server.zmq) as client, asyncio.timeout(PATIENCE_S):

        async def over_http(i: int) -> int:
            reply = await http.completions.create(model=MODEL, prompt=f"{i} and", max_tokens=12)
            return int(reply.usage.completion_tokens if reply.usage else 0)

        async def over_zmq(i: int) -> int:
            stream = client.generate(f"{i} and", SamplingParams(n=2, max_tokens=12))
            return len({output.index for output in await all_of(stream) if output.finish_reason})

        results = await asyncio.gather(*(one(i) for i in range(12) for one in (over_http, over_zmq)))
        assert all(1 <= tokens <= 12 for tokens in results[::2])
        assert results[1::2] == [2] * 12
    await asyncio.to_thread(server.until_idle)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_resumed_stream_equals_the_uninterrupted_one(server: Server, params: SamplingParams) -> None:
    # The length of an answer, and whether it has an emoji, depend on the rounding of the CPU's instruction set.
    params = replace(params, min_tokens=params.max_tokens)
    async with await AsyncClient.connect(server.zmq) as client:
        first = client.generate(QUESTION, params)
        whole = await all_of(first)
        assert first.prompt_token_ids is not None and first.seed is not None
        params = replace(params, seed=first.seed)
        text = "".join(output.text for output in whole)
        ids = [token_id for output in whole for token_id in output.token_ids]
        boundaries = {output.token_offset: output.text_offset for output in whole}
        assert len(ids) > 12
        for cut in range(1, len(ids) + 1, STRIDE):
            resumed = await all_of(client.generate(first.prompt_token_ids, params, received=ids[:cut]))
            begin = resumed[0].text_offset
            assert [token_id for output in resumed for token_id in output.token_ids] == ids[cut:], cut
            assert text[:begin] + "".join(output.text for output in resumed) == text, cut
            assert resumed[-1].finish_reason == whole[-1].finish_reason
            assert boundaries.get(cut, begin) == begin, "the text that an uninterrupted client has at this point"


async def test_a_stop_string_and_a_stop_id_across_the_cut_are_found(server: Server) -> None:
    async with await AsyncClient.connect(server.zmq) as client:
        free, ids, _, _ = await text_and_ids(client.generate(STORY, GREEDY))
        stop = free[20:34]  # several ids long
        assert len(stop) == 14
        for params in (
            replace(GREEDY, stop=[stop]),
            replace(GREEDY, stop=[stop], include_stop_str_in_output=True),
            replace(GREEDY, stop_token_ids=[ids[9]]),
        ):
            text, stopped, finish, reason = await text_and_ids(client.generate(STORY, params))
            assert finish == "stop"
            assert len(stopped) < len(ids)
            for cut in {*range(1, len(stopped) + 1, STRIDE), len(stopped)}:
                resumed = await all_of(client.generate(STORY, params, received=stopped[:cut]))
                assert text[: resumed[0].text_offset] + "".join(output.text for output in resumed) == text, cut
                assert [token_id for output in resumed for token_id in output.token_ids] == stopped[cut:], cut
                assert (resumed[-1].finish_reason, resumed[-1].stop_reason) == (finish, reason), cut
        with pytest.raises(RequestError) as raised:
            await all_of(client.generate(STORY, GREEDY, received=[*ids, 5]))
        assert raised.value.param == "received"


def test_the_blocking_client_streams_and_aborts(server: Server) -> None:
    with Client(server.zmq) as client:
        stream = client.generate("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True))
        first = next(stream)
        assert first.token_ids
        stream.abort()
        assert [output.finish_reason for output in stream][-1] == "abort"
    server.until_idle()


async def test_a_stage_that_dies_closes_every_stream_and_another_server_continues(server: Server) -> None:
    with Server("supervisor.max_restarts=0") as doomed:
        async with await AsyncClient.connect(doomed.zmq, reconnect_timeout_s=0) as client:
            params = SamplingParams(temperature=1, max_tokens=1500, ignore_eos=True)
            streams = [client.generate("Hi", params) for _ in range(3)]
            text, ids = "", []
            async with asyncio.timeout(PATIENCE_S):
                while len(ids) < 20:
                    output = await anext(streams[0])
                    text, ids = text + output.text, ids + output.token_ids
            os.kill(doomed.stage("detokenize").pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(RequestError, match="stage detokenize") as raised:
                    await all_of(stream)
                assert (raised.value.status, raised.value.code) == (500, "stage_died")
            assert await asyncio.to_thread(doomed.process.wait, 60) == 3
            with pytest.raises(ConnectionLost, match="closed the connection"):
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        client.generate("Hi")
                        await asyncio.sleep(0.01)
    first = streams[0]
    assert first.prompt_token_ids is not None
    params = replace(params, seed=first.seed, max_tokens=len(ids) + 10)
    async with await AsyncClient.connect(server.zmq) as client:
        whole, whole_ids, _, _ = await text_and_ids(client.generate(first.prompt_token_ids, params))
        resumed = await all_of(client.generate(first.prompt_token_ids, params, received=ids))
    assert whole_ids[: len(ids)] == ids
    assert [*ids, *(token_id for output in resumed for token_id in output.token_ids)] == whole_ids
    assert text[: resumed[0].text_offset] + "".join(output.text for output in resumed) == whole


async def test_each_replica_has_an_address_and_drains_its_own_streams(smollm2_dir: Path) -> None:
    port = free_port(2)
    with Server("gateway.replicas=2", f"gateway.zmq=tcp://127.0.0.1:{port}") as own:
        assert own.zmq == f"tcp://127.0.0.1:{port}"
        clients = [await AsyncClient.connect(f"tcp://127.0.0.1:{port + i}") for i in range(2)]
        streams = [client.generate("Hi", SamplingParams(max_tokens=60, ignore_eos=True)) for client in clients]
        for stream in streams:
            async with asyncio.timeout(PATIENCE_S):
                await anext(stream)
        taken = Server(f"gateway.zmq=tcp://127.0.0.1:{port + 1}", until_ready=False)
        assert await asyncio.to_thread(taken.process.wait, 60) == 2
        taken.stop()
        assert f"cannot listen on tcp://127.0.0.1:{port + 1}: Address already in use; choose another" in taken.log()
        taken.process.stderr.close()  # type: ignore[union-attr]
        os.kill(own.process.pid, signal.SIGTERM)
        for stream in streams:
            assert (await all_of(stream))[-1].finish_reason == "length"
        for client in clients:
            await client.close()
        assert await asyncio.to_thread(own.process.wait, 60) == 0
