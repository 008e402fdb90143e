"""`AsyncLLM`: streams, concurrency, and how streams end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from pipeline import LLM, AsyncClient, AsyncLLM, RequestOutput, SamplingParams
from pipeline.errors import PromptError, ServerFailed, StartError, UserError
from tests.e2e.client.scripts import alive
from tests.e2e.conftest import tiny
from tests.e2e.embedded import family_of, until_idle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PATIENCE_S = 30.0


@pytest.fixture
async def streams(llm: LLM) -> AsyncIterator[AsyncLLM]:
    """An `AsyncLLM` attached to the shared test server."""
    async with AsyncLLM.attach(llm.address) as streams:
        yield streams


async def all_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def test_outputs_are_cumulative_deltas_or_final_only(streams: AsyncLLM, llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=2, max_tokens=12, ignore_eos=True)
    (whole,) = llm.generate("Hello", params)
    cumulative = await all_of(streams.generate("Hello", params, "mine"))
    assert {output.request_id for output in cumulative} == {"mine"}
    assert cumulative[-1].outputs == whole.outputs
    assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
    assert len(cumulative) > 2, "tokens are streamed incrementally"
    for before, after in pairwise(cumulative):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.text.startswith(one.text)
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
    deltas = await all_of(streams.generate("Hello", params, output_kind="delta"))
    for index in range(2):
        parts = [one for output in deltas for one in output.outputs if one.index == index]
        assert "".join(part.text for part in parts) == whole.outputs[index].text
        assert [one for part in parts for one in part.token_ids] == whole.outputs[index].token_ids
        assert [part.finish_reason for part in parts][-1] == "length"
    (final,) = await all_of(streams.generate("Hello", params, output_kind="final"))
    assert final.outputs == whole.outputs
    assert final.prompt_token_ids == whole.prompt_token_ids


async def test_the_last_output_has_the_request_s_metrics(llm: LLM) -> None:
    params = SamplingParams(temperature=0, n=2, max_tokens=12, ignore_eos=True)
    begun_s, begun_unix_s = time.monotonic(), time.time()
    async with AsyncLLM(address=llm.address, disable_log_stats=False) as streams:
        outputs = await all_of(streams.generate("Hello", params))
    assert [output.metrics is not None for output in outputs] == [output.finished for output in outputs]
    found = outputs[-1].metrics
    assert found is not None and found.num_generation_tokens == 24
    times = [found.queued_ts, found.scheduled_ts, found.first_token_ts, found.last_token_ts]
    assert times == sorted(times) and found.first_token_ts < found.last_token_ts
    clocks_s = 0.05  # they may be adjusted meanwhile
    assert begun_s - clocks_s <= times[0] and times[-1] <= time.monotonic() + clocks_s
    assert begun_unix_s - clocks_s <= found.arrival_time <= time.time() + clocks_s
    assert 0 < found.first_token_latency < time.monotonic() - begun_s
    assert llm.generate("Hello", GREEDY)[0].metrics is None


async def test_a_chat_can_be_streamed(streams: AsyncLLM, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    outputs = await all_of(streams.chat(messages, GREEDY))
    assert outputs[-1].outputs == llm.chat(messages, GREEDY)[0].outputs


async def test_hundreds_of_streams_run_in_one_loop(streams: AsyncLLM) -> None:
    async def one(number: int) -> str | None:
        last = None
        async for output in streams.generate(f"{number}", SamplingParams(max_tokens=3)):
            last = output
        assert last is not None
        assert last.finished
        return last.prompt

    prompts = await asyncio.gather(*(one(number) for number in range(1500)))
    assert prompts == [str(number) for number in range(1500)]


async def test_an_aborted_stream_ends_with_finish_reason_abort(streams: AsyncLLM) -> None:
    last = None
    async for output in streams.generate("Once", LONG, "one"):
        last = output
        await streams.abort("one")
        await streams.abort("one")
    assert last is not None
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < 200
    await streams.abort("one")
    await streams.abort("never was")
    assert (await all_of(streams.generate("Once", GREEDY, "one")))[-1].finished, "its request id is free again"


async def test_a_stream_that_waits_for_its_turn_can_be_aborted(llm: LLM) -> None:
    async with AsyncLLM.attach(llm.address) as streams:
        num = llm.info.max_open_requests // 2
        first = [asyncio.create_task(all_of(streams.generate("Once", LONG))) for _ in range(num)]
        await asyncio.sleep(0)
        for kind in ("cumulative", "delta", "final"):
            waiting = asyncio.create_task(all_of(streams.generate("late", LONG, "late", output_kind=kind)))
            while "late" not in streams._open:
                await asyncio.sleep(0)
            await streams.abort("late")
            (output,) = await asyncio.wait_for(waiting, PATIENCE_S)
            assert output.finished
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == []
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)


@pytest.mark.parametrize("how", ["cancel", "break", "aclose", "drop"])
async def test_leaving_a_stream_aborts_it(llm: LLM, streams: AsyncLLM, how: str) -> None:
    async def read(started: asyncio.Event) -> None:
        async for _ in streams.generate("Once", LONG):
            started.set()

    if how == "cancel":
        started = asyncio.Event()
        task = asyncio.create_task(read(started))
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "break":
        async for _ in streams.generate("Once", LONG):
            break
    elif how == "aclose":
        async with aclosing(streams.generate("Once", LONG)) as stream:  # type: ignore[type-var]
            await anext(stream)
    else:
        stream = streams.generate("Once", LONG)
        await anext(stream)
        del stream
    async with asyncio.timeout(PATIENCE_S):
        while streams._open:
            await asyncio.sleep(0.01)
    (gateway,) = streams._gateways._found.values()
    assert gateway.slots.num_taken == 0
    await asyncio.to_thread(until_idle, llm)


async def test_requests_wait_while_other_clients_fill_the_server(tiny_model: Path) -> None:
    async with (
        AsyncLLM(**tiny(tiny_model), gateway={"max_open_sequences": 4}) as own,
        await AsyncClient.connect(own.address) as others,
        AsyncLLM.attach(own.address) as attached,
    ):
        held = [others.generate("Once", LONG) for _ in range(4)]
        for stream in held:
            await stream.accepted()
        waiting = asyncio.create_task(all_of(attached.generate("Hello", GREEDY)))
        done, _ = await asyncio.wait((waiting,), timeout=0.2)
        assert not done
        for stream in held:
            stream.abort()
        assert (await asyncio.wait_for(waiting, PATIENCE_S))[-1].finished
        # Our own limit holds: eight at once, of which only four fit, and none is rejected.
        outputs = await asyncio.gather(*(all_of(own.generate("Hello", GREEDY)) for _ in range(8)))
        assert len({str(output[-1].outputs) for output in outputs}) == 1
        with pytest.raises(PromptError, match=r"n = 5 exceeds the limit of 4 open sequences"):
            await all_of(own.generate("Hello", SamplingParams(n=5)))


async def test_invalid_requests_raise_clear_errors(streams: AsyncLLM) -> None:
    with pytest.raises(PromptError, match="prompt must be a text or a list of token ids, not None"):
        await all_of(streams.generate(None))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="sampling_params must be SamplingParams, not dict"):
        await all_of(streams.generate("a", {"n": 1}))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="output_kind must be cumulative, delta or final, not 'all'"):
        await all_of(streams.generate("a", output_kind="all"))  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=r"^this model's maximum context length is 256 tokens"):
        await all_of(streams.generate("word " * 400))
    async with aclosing(streams.generate("Once", LONG, "same")) as stream:  # type: ignore[type-var]
        await anext(stream)
        with pytest.raises(UserError, match="request_id 'same' belongs to a request that is still open"):
            await all_of(streams.generate("Once", LONG, "same"))


async def test_an_llm_created_outside_of_an_event_loop_starts_at_once(tiny_model: Path) -> None:
    llm = await asyncio.to_thread(AsyncLLM, **tiny(tiny_model))
    assert llm.server is not None
    with pytest.raises(UserError, match="not ready yet"):
        _ = llm.info
    results = await asyncio.gather(*(all_of(llm.generate("Hello", GREEDY)) for _ in range(3)))
    assert len({str(outputs[-1].outputs) for outputs in results}) == 1
    family = await asyncio.to_thread(family_of, llm.server.pid, 6)

    def elsewhere() -> None:
        with pytest.raises(UserError, match="in one event loop"):
            asyncio.run(llm.ready())

    await asyncio.to_thread(elsewhere)
    open_one = asyncio.create_task(all_of(llm.generate("Once", LONG)))
    async with asyncio.timeout(PATIENCE_S):
        while not llm._open:
            await asyncio.sleep(0.01)
    await llm.close()
    await llm.close()
    with pytest.raises(ServerFailed, match="this AsyncLLM was closed"):
        await open_one
    with pytest.raises(UserError, match="this AsyncLLM is closed"):
        await all_of(llm.generate("Hello"))
    assert not alive(family)


async def test_a_failed_start_is_reported_to_all_waiting_requests(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path / "nothing.gguf", log_path=tmp_path / "log.txt")
    results = await asyncio.gather(llm.ready(), all_of(llm.generate("a")), return_exceptions=True)
    assert [type(result) for result in results] == [StartError, StartError]
    assert "nothing.gguf" in str(results[0])
    assert "nothing.gguf" in (tmp_path / "log.txt").read_text()
    with pytest.raises(StartError):
        async with llm:
            pass


async def test_a_start_can_be_cancelled(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    llm = AsyncLLM(**tiny(tiny_model), log_path=log)
    assert llm.server is not None
    first = psutil.Process(llm.server.pid)
    starting = asyncio.create_task(llm.__aenter__())
    await asyncio.sleep(0.3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive([first])
    assert "ready on" not in log.read_text(), "it ended during its start"
