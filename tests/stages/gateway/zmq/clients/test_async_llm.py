"""An `AsyncLLM` connected to a gateway whose stages the test plays."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import AsyncLLM, RequestOutput, SamplingParams
from pipeline.client.inputs.prompts import CheckedPrompt
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.admin.test_abort_requests import abort, counts, play_abort
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.peers import address_of, do
from tests.stages.gateway.test_metrics import counts_of


@pytest.fixture
async def llm(gate: Gate) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.attach(address_of(gate), timeout_s=PATIENCE_S) as llm:
        yield llm


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream][-1]


async def test_a_request_id_of_the_caller_is_used_by_the_server(gate: Gate, llm: AsyncLLM) -> None:
    task = asyncio.create_task(last_of(llm.generate("Hi", request_id="story")))
    submit = await do(gate.begin)
    assert await do(abort, gate, "story") == counts(1, 0)
    await do(play_abort, gate, submit, "so far")
    output = await task
    assert (output.request_id, output.finished) == ("story", True)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("so far", "abort")


async def test_a_generated_request_id_is_not_used_by_the_server(gate: Gate, llm: AsyncLLM) -> None:
    """Each `AsyncLLM` counts from 0, and the server has many clients."""
    task = asyncio.create_task(last_of(llm.generate("Hi")))
    submit = await do(gate.begin)
    assert await do(abort, gate, "0") == counts(0, 1)
    gate.finish(submit, "all")
    output = await task
    assert (output.request_id, output.outputs[0].text) == ("0", "all")


@pytest.mark.parametrize("name", ["", "my story", "x" * 257, "ümlaut", 5])
async def test_an_invalid_request_id_is_reported_before_sending(llm: AsyncLLM, name: str) -> None:
    with pytest.raises(UserError, match=r"^request_id must be 1 to 256 visible ASCII characters without spaces, not "):
        await last_of(llm.generate("Hi", request_id=name))


async def test_the_complete_output_includes_text_without_ids(gate: Gate, llm: AsyncLLM) -> None:
    news: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    ready = CheckedPrompt({"prompt": "Hi"}, "Hi")
    complete = llm.complete(ready, SamplingParams(), lambda *numbers: news.put_nowait(numbers), RequestOptions())
    whole = asyncio.create_task(complete)
    submit = await do(gate.begin)
    async with asyncio.timeout(PATIENCE_S):
        assert await news.get() == (3, 0)
        gate.delta(submit, "Hel", 2)
        assert await news.get() == (0, 2)
        gate.delta(submit, "l", 0)
        assert await news.get() == (0, 0)
        gate.finish(submit, "o")
        output = await whole
    assert output.finished
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("Hello", [0, 1, 2])
    assert output.outputs[0].finish_reason == "stop"


async def test_options_reach_the_server_and_the_last_output_has_cached_tokens(gate: Gate, llm: AsyncLLM) -> None:
    task = asyncio.create_task(last_of(llm.generate({"prompt": "Hi", "cache_salt": "own"}, cache_salt="for all")))
    submit = await do(gate.begin)
    assert submit.options.cache_salt == "own"
    gate.delta(submit, "x", num_cached=2)
    gate.finish(submit, "y")
    output = await task
    assert (output.outputs[0].text, output.num_cached_tokens) == ("xy", 2)
    chat = asyncio.create_task(last_of(llm.chat([{"role": "user", "content": "Hi"}], cache_salt="for all")))
    assert (await do(gate.serve)).options.cache_salt == "for all"
    assert (await chat).finished


@pytest.mark.parametrize("where", ["ingest", "schedule"])
async def test_a_request_that_times_out_before_any_output_is_aborted(gate: Gate, llm: AsyncLLM, where: str) -> None:
    task = asyncio.create_task(last_of(llm.generate("Hi", SamplingParams(n=2), timeout_s=0.1)))
    submit = await do(gate.submit if where == "ingest" else gate.begin)
    output = await task
    assert output.finished
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("", "abort")] * 2
    assert output.num_cached_tokens is None
    for index in range(2):
        gate.finish(submit, index=index, finish=m.Finish.ABORT)
    again = asyncio.create_task(last_of(llm.generate("Hi")))
    await do(gate.serve)
    assert (await again).outputs[0].text == "Hello"


@pytest.mark.parametrize("options", [{"priority": "x"}, {"cache_salt": 5}, {"timeout_s": 0}])
async def test_an_invalid_option_is_named(llm: AsyncLLM, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(options))} must"):
        llm.generate("Hi", **options)


async def test_a_rejected_request_is_retried_after_the_servers_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the client's own shorter delay."""
    monkeypatch.setattr("pipeline.client.connection.open_request.BUSY_FIRST_S", 1e-9)
    monkeypatch.setattr("pipeline.client.connection.open_request.BUSY_MAX_S", 0.2)
    with Gate(tmp_path, max_open_sequences=1) as gate:
        async with AsyncLLM.attach(address_of(gate), timeout_s=PATIENCE_S) as llm:
            other = gate.post(CHAT)
            held = await do(gate.begin)
            begin_s = time.monotonic()
            waiting = asyncio.create_task(last_of(llm.generate("Hi")))
            async with asyncio.timeout(PATIENCE_S):
                while (await do(counts_of, gate)).num_overloaded < 3:
                    assert not waiting.done()
            assert (await do(counts_of, gate)).num_overloaded <= 1 + (time.monotonic() - begin_s) / 0.1
            gate.finish(held)
            await do(other.result)
            await do(gate.serve, "admitted")
            assert (await waiting).outputs[0].text == "admitted"
