"""What a client sends again after a lost connection, and what its streams make of the answers."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.connection import session
from pipeline.client.connection import stream as stream_module
from pipeline.client.connection.gateways import Gateways
from pipeline.client.connection.stream import WINDOW, Stream
from pipeline.client.connection.wire import OutputDelta, unpacked
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.inputs.structured_params import StructuredOutputsParams
from tests.client.fake_gateway import PATIENCE_S, WELCOME, FakeGateway, ids
from tests.zmq_requests import chat

PROMPT = ids(7, 8, 9)
SEED = 2**63 + 5
WORDS = [{"role": "user", "content": "Hi"}]
CALL = chat([p.MessageParam("user", "Hi")], tools="[]", tool_choice="required")
STRICT = chat(
    [p.MessageParam("user", "Hi")], tools=[{"type": "function", "function": {"name": "look", "strict": True}}]
)


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    await gateway.start()
    yield gateway
    gateway.close()


async def connected(gateway: FakeGateway, **options: Any) -> AsyncClient:
    connecting = asyncio.create_task(AsyncClient.connect(gateway.address, **options))
    await gateway.receive(p.Hello)
    return await connecting


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[AsyncClient]:
    client = await connected(gateway)
    yield client
    await client.close()


async def all_of(stream: Stream) -> list[OutputDelta]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


def accepted(request: p.Generate, prompt: bytes = PROMPT) -> p.Accepted:
    return p.Accepted(request.request_id, prompt, SEED, f"cmpl-{request.request_id}", [b"a", b"b", b"c"])


def finished(request: p.Generate) -> p.Finished:
    return p.Finished(request.request_id, 3, 4, None, [0])


async def begun(gateway: FakeGateway, stream: Stream, *outputs: p.Output, **fields: Any) -> p.Generate:
    """The request, which got these outputs; then the gateway dies and returns."""
    request = await gateway.receive(p.Generate)
    await gateway.send(accepted(request))
    if outputs:
        await gateway.send(p.Delta(request.request_id, list(outputs), **fields))
    num = len(outputs)
    await until(lambda: stream.id is not None and (not num or stream._deltas or stream._num_read))
    await gateway.restart()
    return request


async def test_a_request_continues_behind_all_it_has_received(gateway: FakeGateway, client: AsyncClient) -> None:
    params = SamplingParams(n=3, temperature=1, logprobs=0, max_tokens=9)
    stream = client.generate("Hi", params, name="mine", priority=2, cache_salt="salt", timeout_s=50, timings=True)
    first = await begun(
        gateway,
        stream,
        p.Output(0, "ab", ids(1, 2), 0, 0, None, None, bytes(8), [b"a", b"b"]),
        p.Output(1, "x", ids(3), 0, 0, "stop", 3, bytes(4), [b"x"]),
    )
    again = await gateway.receive(p.Generate)
    assert 0 < (again.request.timeout_s or 0) < 50
    assert again == replace(
        first,
        request=replace(
            first.request, prompt=None, prompt_token_ids=PROMPT, seed=SEED, timeout_s=again.request.timeout_s
        ),
        received=[ids(1, 2), ids(3), b""],
        credits=WINDOW - 1,
    )
    await gateway.send(
        replace(accepted(again), id="cmpl-other"),
        p.Delta(
            again.request_id,
            [
                p.Output(0, "bcd", ids(2, 4, 5), 1, 1, None, None, bytes(12), [b"b", b"c", b"d"]),
                p.Output(1, "x", b"", 0, 1, "stop", 3),
                p.Output(2, "y", ids(6), 0, 0, "length", None, bytes(4), [b"y"]),
            ],
        ),
        p.Delta(again.request_id, [p.Output(0, "", b"", 4, 4, "length")]),
        finished(again),
    )
    outputs = await all_of(stream)
    by_index = [[output for output in outputs if output.index == index] for index in range(3)]
    assert ["".join(output.text for output in each) for each in by_index] == ["abcd", "x", "y"]
    assert [[one for output in each for one in output.token_ids] for each in by_index] == [[1, 2, 4, 5], [3], [6]]
    assert [output.text_offset for output in by_index[0]] == [0, 2, 4]
    assert [output.token_offset for output in by_index[0]] == [0, 2, 4]
    assert all(len(output.logprobs or []) == len(output.token_ids) for output in outputs)
    pieces = [one.bytes for output in by_index[0] for each in output.logprobs or [] for one in each.values()]
    assert pieces == [b"a", b"b", b"c", b"d"]
    assert [[output.finish_reason for output in each][-1] for each in by_index] == ["length", "stop", "length"]
    assert (stream.seed, stream.id, stream.prompt_token_ids) == (SEED, "cmpl-other", unpacked(PROMPT))


async def test_requests_without_an_answer_are_sent_again_as_they_were(
    gateway: FakeGateway, client: AsyncClient
) -> None:
    streams = [client.generate(WORDS, SamplingParams(max_tokens=2)), client.embed("Hi", PoolingParams())]
    first = [await gateway.receive(p.Generate) for _ in streams]
    gateway.kill()
    await until(lambda: not client.is_connected)
    streams.append(client.generate("late"))
    await gateway.start()
    again = [await gateway.receive(p.Generate) for _ in streams]
    assert again[:2] == first
    assert again[2].request.prompt == "late"
    for request in again:
        await gateway.send(p.Finished(request.request_id, 3, 4, None, [0], ids(0)))
    for one in streams:
        await one.closed()
    assert (await streams[1].embedded()).tolist() == [0]


@pytest.mark.parametrize("prompt", [PROMPT, ids(7, 8)])
@pytest.mark.parametrize(
    ("chat", "params"),
    [
        (CALL, None),
        (STRICT, None),
        (WORDS, SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))),
    ],
)
async def test_a_chat_whose_output_is_constrained_is_sent_again_as_the_same_chat(
    gateway: FakeGateway, client: AsyncClient, prompt: bytes, chat: Any, params: SamplingParams | None
) -> None:
    """Its grammar is made from the tools, and allows reasoning if the model reasons."""
    stream = client.generate(chat, params)
    first = await begun(gateway, stream, p.Output(0, "a", ids(1), 0, 0))
    again = await gateway.receive(p.Generate)
    assert (again.request, again.received) == (replace(first.request, seed=SEED), [ids(1)])
    await gateway.send(accepted(again, prompt))
    if prompt == PROMPT:
        await gateway.send(p.Delta(1, [p.Output(0, "b", ids(2), 1, 1, "stop")]), finished(again))
        assert [output.text for output in await all_of(stream)] == ["a", "b"]
        return
    with pytest.raises(ConnectionLost, match="can't be continued: its prompt had 3 ids, and the server now makes 2"):
        await all_of(stream)
    assert (await gateway.receive(p.Abort)).request_id == again.request_id


async def test_log_probabilities_of_the_prompt_are_not_repeated(gateway: FakeGateway, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(n=2, prompt_logprobs=0))
    ended = p.Output(0, "a", ids(1), 0, 0, "length")
    await begun(gateway, stream, ended, prompt_records=bytes(4))
    again = await gateway.receive(p.Generate)
    assert again.received == [], "the first sequence is computed again for the records that are missing"
    await gateway.send(
        accepted(again),
        p.Delta(1, [ended, p.Output(1, "b", ids(2), 0, 0, "length")], bytes(8)),
        finished(again),
    )
    assert [output.text for output in await all_of(stream)] == ["a", "b"]
    assert stream.prompt_logprobs is not None
    assert [list(each or {}) for each in stream.prompt_logprobs] == [[], [8], [9]]


async def test_best_of_begins_again_with_its_seed(gateway: FakeGateway, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(best_of=3))
    await begun(gateway, stream)
    again = await gateway.receive(p.Generate)
    assert (again.received, again.request.seed, again.request.best_of) == ([], SEED, 3)


async def test_a_request_that_lacks_only_its_closing_message_is_not_sent_again(
    gateway: FakeGateway, client: AsyncClient
) -> None:
    stream = client.generate("Hi", SamplingParams(n=2))
    ends = [p.Output(index, "a", ids(1), 0, 0, "abort") for index in range(2)]
    await begun(gateway, stream, *ends)
    assert [output.finish_reason for output in await all_of(stream)] == ["abort", "abort"]
    assert (stream.num_prompt_tokens, stream.num_output_tokens) == (3, 2)


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_request_is_aborted_without_a_gateway(gateway: FakeGateway, client: AsyncClient, when: str) -> None:
    one, other = client.generate("Hi", SamplingParams(n=2)), client.embed("Hi")
    request = await gateway.receive(p.Generate)
    await gateway.receive(p.Generate)
    ended = p.Output(1, "b", ids(2), 0, 0, "stop")
    await gateway.send(accepted(request), p.Delta(1, [p.Output(0, "a", ids(1), 0, 0), ended]))
    await until(lambda: one._deltas)
    if when == "before":
        one.abort()
        other.abort()
        await gateway.receive(p.Abort)
    gateway.kill()
    await until(lambda: not client.is_connected)
    if when == "while":
        one.abort()
        other.abort()
    received = [(output.index, output.text, output.token_offset, output.finish_reason) for output in await all_of(one)]
    assert received == [(0, "a", 0, None), (1, "b", 0, "stop"), (0, "", 1, "abort")]
    with pytest.raises(RequestError) as raised:
        await other.embedded()
    assert (raised.value.status, raised.value.code) == (503, "ended")


async def test_deadlines_pass_while_there_is_no_gateway(gateway: FakeGateway, client: AsyncClient) -> None:
    begun_one = client.generate("Hi", timeout_s=0.5)
    request = await gateway.receive(p.Generate)
    await gateway.send(accepted(request), p.Delta(1, [p.Output(0, "a", ids(1), 0, 0)]))
    await until(lambda: begun_one._deltas)
    gateway.kill()
    await until(lambda: not client.is_connected)
    new_one = client.generate("Hi", timeout_s=0.1)
    with pytest.raises(RequestError, match=r"timed out after 0\.1 s") as raised:
        await all_of(new_one)
    assert (raised.value.status, raised.value.code) == (504, "timeout")
    assert [output.finish_reason for output in await all_of(begun_one)] == [None, "abort"]


@pytest.mark.parametrize("code", ["draining", "shutting_down", "failed", "stage_died"])
async def test_a_request_that_an_ending_server_fails_waits_for_the_next(
    gateway: FakeGateway, client: AsyncClient, code: str
) -> None:
    stream = client.generate("Hi")
    request = await gateway.receive(p.Generate)
    await gateway.send(
        accepted(request),
        p.Delta(1, [p.Output(0, "a", ids(1), 0, 0)]),
        p.Failed(1, p.Failure(503, "the server ends", None, code)),
    )
    await until(lambda: client._session._waiting)
    await gateway.restart()
    assert (await gateway.receive(p.Generate)).received == [ids(1)]
    assert not client._session._waiting
    assert not stream.is_closed


@pytest.mark.parametrize("code", ["draining", "stage_died"])
async def test_a_server_that_does_not_end_fails_its_requests(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(session, "ENDING_S", 0.01)
    client = await connected(gateway, reconnect_timeout_s=0.05 if code == "draining" else 60)
    stream = client.generate("Hi")
    await gateway.receive(p.Generate)
    await gateway.send(p.Failed(1, p.Failure(500, "it died twice", None, code)))
    with pytest.raises(RequestError, match="it died twice"):
        await all_of(stream)
    assert client.is_connected
    await client.close()


@pytest.mark.parametrize("code", ["overloaded", "rate_limit_exceeded"])
async def test_a_repeated_request_waits_for_room(gateway: FakeGateway, client: AsyncClient, code: str) -> None:
    stream = client.generate("Hi")
    await begun(gateway, stream, p.Output(0, "a", ids(1), 0, 0))
    full = p.Failed(1, p.Failure(503, "full", None, code, 1))
    again = await gateway.receive(p.Generate)
    await gateway.send(replace(full, failure=replace(full.failure, retry_after_s=0)))
    assert await gateway.receive(p.Generate) == again
    await gateway.send(full)
    await until(lambda: client._session._waiting)
    stream.abort()
    assert [output.finish_reason for output in await all_of(stream)] == [None, "abort"]
    new = client.generate("Hi")
    request = await gateway.receive(p.Generate)
    await gateway.send(replace(full, request_id=request.request_id))
    with pytest.raises(RequestError, match="full"):
        await all_of(new)


@pytest.mark.parametrize("timeout_s", [0, 0.1])
async def test_without_a_server_all_requests_fail(gateway: FakeGateway, timeout_s: float) -> None:
    client = await connected(gateway, reconnect_timeout_s=timeout_s)
    streams = [client.generate("Hi") for _ in range(2)]
    await gateway.receive(p.Generate)
    gateway.kill()
    words = r"closed the connection, and none answered within 0\.1 s$" if timeout_s else "closed the connection$"
    for one in streams:
        with pytest.raises(ConnectionLost, match=words):
            await all_of(one)
    assert client.is_lost
    with pytest.raises(ConnectionLost, match=words):
        client.generate("Hi")
    await client.close()


async def test_another_model_does_not_continue_requests(gateway: FakeGateway, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    await gateway.receive(p.Generate)
    gateway.welcome = replace(WELCOME, model="other")
    await gateway.restart()
    hello = asyncio.create_task(gateway.receive(p.Generate))
    with pytest.raises(ConnectionLost, match="now serves another model: other"):
        await all_of(stream)
    assert client.info.model == "other"
    client.generate("New")
    assert (await hello).request.prompt == "New"


async def test_a_server_that_refuses_the_client_ends_its_requests(gateway: FakeGateway, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    await gateway.receive(p.Generate)
    gateway.welcome = p.Error(p.Failure(401, "wrong key", None, "invalid_api_key"))  # type: ignore[assignment]
    await gateway.restart()
    hello = asyncio.create_task(gateway.receive(p.Hello))
    with pytest.raises(ConnectionLost, match="now it refuses this client: wrong key"):
        await all_of(stream)
    await hello


async def test_a_server_that_starts_is_asked_again(gateway: FakeGateway, client: AsyncClient) -> None:
    client.generate("Hi")
    kept = client.generate("Kept")
    for _ in range(2):
        await gateway.receive(p.Generate)
    gateway.welcome = p.Error(p.Failure(503, "it starts", None, "starting"))  # type: ignore[assignment]
    gc.collect()
    await gateway.restart()
    await gateway.receive(p.Hello)
    gateway.welcome = WELCOME
    assert (await gateway.receive(p.Generate)).request.prompt == "Kept", "the other stream is garbage"
    assert not kept.is_closed


async def test_a_request_that_may_cause_the_losses_fails(
    gateway: FakeGateway, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_LOSSES", 2)
    one = client.generate("Hi")
    for _ in range(2):
        await gateway.receive(p.Generate)
        await gateway.restart()
    with pytest.raises(ConnectionLost, match="2 connections were lost without output of this request"):
        await all_of(one)


async def test_requests_go_to_a_gateway_that_is_connected(gateway: FakeGateway) -> None:
    other = FakeGateway()
    await other.start()
    addresses = [gateway.address, other.address]
    gateway.welcome = replace(WELCOME, addresses=addresses)
    other.welcome = replace(WELCOME, addresses=addresses, gateway=1)
    gateways = Gateways(gateway.address, None, PATIENCE_S, None, 60, "AsyncLLM")
    hellos = [asyncio.create_task(one.receive(p.Hello)) for one in (gateway, other)]
    picked = await gateways.pick()
    await asyncio.gather(*hellos)
    assert (picked.client.address, gateways.addresses) == (gateway.address, addresses)
    gateway.kill()
    await until(lambda: not picked.client.is_connected)
    assert (await gateways.pick()).client.address == other.address
    assert gateways.addresses == addresses
    await gateways.close()
    other.close()


async def test_a_gap_in_the_output_is_an_error(gateway: FakeGateway, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    await begun(gateway, stream, p.Output(0, "a", ids(1), 0, 0))
    again = await gateway.receive(p.Generate)
    await gateway.send(accepted(again), p.Delta(1, [p.Output(0, "c", ids(3), 2, 2)]))
    with pytest.raises(ConnectionLost, match="1 ids and 1 characters were received, and the server went on after 2"):
        await all_of(stream)
    assert (await gateway.receive(p.Abort)).request_id == 1


@pytest.mark.parametrize("value", [-1, "1", float("inf"), True])
async def test_an_invalid_timeout_is_named(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^reconnect_timeout_s must be"):
        await AsyncClient.connect("ipc://@pipeline/missing/zmq", reconnect_timeout_s=value)
