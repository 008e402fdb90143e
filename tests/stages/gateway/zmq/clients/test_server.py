"""The ZeroMQ server, as its clients see it."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import messages as m
from pipeline.version import VERSION
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.peers import (
    HELLO,
    RawPeer,
    TcpPeer,
    address_of,
    all_of,
    do,
    free_port,
)
from tests.zmq_requests import chat, generate, named


async def test_a_stream_has_prompt_ids_seed_text_ids_and_one_finish(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(seed=7, max_tokens=5))
    submit = await do(gate.submit)
    assert submit.prompt == m.TextPrompt("Hi")
    assert (submit.options.max_tokens, submit.options.seed) == (5, 7)
    gate.accept(submit)
    gate.delta(submit, "Hel", 2)
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(stream)
    assert first == OutputDelta(0, "Hel", [0, 1])
    assert (stream.prompt_token_ids, stream.seed) == ([0, 1, 2], 7)
    gate.finish(submit, "lo")
    assert await all_of(stream) == [OutputDelta(0, "lo", [2], "stop", None, 3, 2)]
    assert (stream.num_prompt_tokens, stream.num_output_tokens) == (3, 3)
    assert await do(gate.closed) == (submit.request_id, 1)


async def test_the_server_info_describes_the_model(gate: Gate, client: AsyncClient) -> None:
    info = client.info
    assert (info.model, info.max_model_len, info.vocab_size, info.protocol_version) == (MODEL, 512, 1000, 2)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (b"\x95\xa5hello\x01\x01\xa3old\xc0", "the client version 1: update the client, or use the HTTP API"),
        (b"\x95\xa5hello\x03\x04\xa3new\xc0", "the client versions 3 to 4: update the server, or use the HTTP API"),
    ],
)
def test_a_client_of_another_version_gets_the_server_s_and_what_to_do(gate: Gate, hello: bytes, words: str) -> None:
    with RawPeer(gate, hello=False) as peer:
        peer.send(hello)
        kind, failure = msgspec.msgpack.decode(peer.socket.recv())
        assert (kind, failure[0], failure[3]) == ("error", 400, "unsupported_version")
        assert failure[1] == f"this server (Pipeline {VERSION}) speaks version 2 of the ZeroMQ protocol, and {words}"
        assert peer.is_disconnected()


async def test_chats_and_token_ids_are_accepted_as_prompts(gate: Gate, client: AsyncClient) -> None:
    chat = client.generate([{"role": "developer", "content": "Be kind"}, {"role": "user", "content": "Hi"}])
    submit = await do(gate.serve)
    assert submit.prompt == m.ChatPrompt([m.ChatMessage("developer", "Be kind"), m.ChatMessage("user", "Hi")])
    assert [output.text for output in await all_of(chat)] == ["Hello"]
    ids = client.generate([5, 6])
    submit = await do(gate.serve)
    assert submit.prompt == m.IdsPrompt(bytes([5, 0, 0, 0, 6, 0, 0, 0]))
    assert [output.text for output in await all_of(ids)] == ["Hello"]


async def test_a_chat_with_tools_reaches_the_stages(gate: Gate, client: AsyncClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Athens"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Is it cold"}, {"type": "text", "text": "there?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I look."},
        {"role": "tool", "content": "31 °C", "tool_call_id": "c1"},
    ]
    stream = client.generate(messages)
    submit = await do(gate.serve)
    assert submit.prompt == m.ChatPrompt(
        [
            m.ChatMessage("user", "Is it cold\nthere?", None, ["Is it cold", "there?"]),
            m.ChatMessage(
                "assistant", None, None, None, [m.ToolCall("c1", "weather", '{"city":"Athens"}')], None, "I look."
            ),
            m.ChatMessage("tool", "31 °C", None, None, [], "c1"),
        ]
    )
    await all_of(stream)
    tools = '[{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}]'
    given = chat(
        [p.MessageParam("user", "Hi"), p.MessageParam("assistant", "It")],
        add_generation_prompt=False,
        continue_final_message=True,
        tools=tools,
        tool_choice=named("weather"),
        parallel_tool_calls=False,
        documents='[{"text":"x"}]',
        chat_template_kwargs='{"enable_thinking":false}',
    )
    stream = client.generate(given)
    submit = await do(gate.serve)
    assert submit.prompt == m.ChatPrompt(
        [m.ChatMessage("user", "Hi"), m.ChatMessage("assistant", "It")],
        False,
        True,
        tools,
        "named",
        "weather",
        False,
        '[{"text":"x"}]',
        '{"enable_thinking":false}',
    )
    await all_of(stream)


def test_an_unknown_model_is_404(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.send(generate(2**64 - 1, "Hi", credits=1, model="gpt-5"))
        failed = peer.receive(p.Failed)
        assert (failed.request_id, failed.failure.status, failed.failure.code) == (2**64 - 1, 404, "model_not_found")


async def test_a_rejection_by_ingest_is_raised_with_its_field(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    submit = await do(gate.submit)
    gate.reject(submit, m.Failure(400, "too long", "prompt", "context_length_exceeded"))
    with pytest.raises(RequestError, match="too long") as raised:
        await all_of(stream)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, "prompt", "context_length_exceeded")


async def test_http_and_zmq_clients_share_the_credits(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_sequences=1) as gate:
        async with await AsyncClient.connect(address_of(gate)) as client:
            first = client.generate("Hi")
            submit = await do(gate.begin)
            assert (await asyncio.wrap_future(gate.complete({"model": MODEL, "prompt": "Hi"}))).status_code == 503
            with pytest.raises(RequestError) as raised:
                await all_of(client.generate("Hi"))
            assert (raised.value.status, raised.value.code) == (503, "overloaded")
            gate.finish(submit, "x")
            await all_of(first)
            again = gate.complete({"model": MODEL, "prompt": "Hi"})
            await do(gate.serve)
            assert (await asyncio.wrap_future(again)).status_code == 200


class TestAborting:
    async def test_an_abort_returns_the_output_so_far_and_one_finish(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        gate.delta(submit, "Hel")
        assert (await anext(stream)).text == "Hel"
        stream.abort()
        stream.abort()
        assert await all_of(stream) == [OutputDelta(0, "", [], "abort", None, 3, 1)]
        abort = await do(gate.rig.receive, "schedule", m.Abort)
        assert abort.request_id == submit.request_id
        gate.finish(submit, "late", finish=m.Finish.ABORT)
        await do(gate.closed)
        assert (await do(gate.rig.load)).num_open_requests == 0

    async def test_a_request_can_be_aborted_before_acceptance(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi", SamplingParams(n=2))
        await do(gate.submit)
        stream.abort()
        assert [(o.index, o.finish_reason) for o in await all_of(stream)] == [(0, "abort"), (1, "abort")]

    def test_an_abort_of_an_unknown_or_finished_request_has_no_effect(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.send(p.Abort(99))
            peer.send(p.Credit(99, 5))
            peer.generate(1)
            gate.serve()
            assert isinstance([peer.receive() for _ in range(3)][-1], p.Finished)
            peer.send(p.Abort(1))
            assert peer.is_still_served()
        assert gate.rig.load().num_open_requests == 0

    async def test_an_unreferenced_stream_is_aborted(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        gate.delta(submit, "Hel")
        await anext(stream)
        del stream
        gc.collect()
        client.generate("another")  # or the next heartbeat
        another = await do(gate.submit)
        aborts = [await do(gate.rig.receive, "schedule", m.Abort) for _ in range(2)]
        assert {abort.request_id for abort in aborts} == {submit.request_id, another.request_id}


class TestDisconnectedClients:
    @pytest.mark.parametrize("how", ["bye", "disconnect"])
    def test_a_disconnect_aborts_requests_at_once(self, gate: Gate, how: str) -> None:
        with RawPeer(gate) as other:
            other.generate(1)
            kept = gate.begin()
            with RawPeer(gate) as peer:
                peer.generate(1)
                submit = gate.begin()
                peer.receive(p.Accepted)
                if how == "bye":
                    peer.send(p.Bye())
                    assert peer.is_disconnected()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            gate.finish(kept, "x")
            assert [type(other.receive()) for _ in range(3)] == [p.Accepted, p.Delta, p.Finished]

    async def test_closing_a_client_raises_in_its_streams(self, gate: Gate) -> None:
        client = await AsyncClient.connect(address_of(gate))
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        await client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await all_of(stream)
        with pytest.raises(ConnectionLost, match="closed"):
            client.generate("Hi")
        assert (await do(gate.rig.receive, "schedule", m.Abort)).request_id == submit.request_id

    def test_a_reset_tcp_connection_aborts_requests(self, tmp_path: Path) -> None:
        with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{free_port()}") as gate:
            address = gate.rig.settings.gateway.zmq
            with TcpPeer(address) as peer:
                peer.send(HELLO)
                peer.send(generate(1, "Hi", credits=10))
                submit = gate.begin()
                peer.reset()
                assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
