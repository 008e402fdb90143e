"""The ZeroMQ door, as its clients see it."""

import asyncio
import contextlib
import gc
import json
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient, Client, ConnectionLost, Output, RequestError, Stream
from pipeline.client.sampling_params import SamplingParams
from pipeline.client.structured_params import StructuredOutputsParams
from pipeline.runtime import messages as m
from pipeline.stages.gateway.zmq import listener
from pipeline.stages.gateway.zmq import server as server_module
from pipeline.stages.gateway.zmq import stream as zmq_stream
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, MODEL, Gate
from tests.stages.gateway.peers import HELLO, RawPeer, until

CLIENT_MESSAGES = [
    p.Generate(1, "", p.TextPrompt("Hi"), p.Params(), 10),
    p.Generate(2, MODEL, p.TokensPrompt(bytes(8)), p.Params(n=2, seed=5, stop=["a"]), 0, [bytes(4), b""]),
    p.Generate(3, "", p.ChatPrompt([p.ChatMessage("user", "Hi")]), p.Params(), 10),
    p.Abort(1),
    p.Credit(1, 5),
    p.Ping(9),
]


def address_of(gate: Gate) -> str:
    return f"ipc://@pipeline/{gate.address[1]}/door"


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        yield client


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline-client")]


async def do(function: Any, *args: Any) -> Any:
    """Play the stages without stopping the client's loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), PATIENCE_S)


async def all_of(stream: Stream) -> list[Output]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def test_a_stream_has_the_prompts_ids_the_seed_text_ids_and_one_end(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(seed=7, max_tokens=5))
    submit = await do(gate.submit)
    assert submit.prompt == m.TextPrompt("Hi")
    assert (submit.max_tokens, submit.sampling.seed) == (5, 7)
    gate.accept(submit)
    gate.delta(submit, "Hel", 2)
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(stream)
    assert first == Output(0, "Hel", [0, 1])
    assert (stream.prompt_token_ids, stream.seed) == ([0, 1, 2], 7)
    gate.finish(submit, "lo")
    assert await all_of(stream) == [Output(0, "lo", [2], "stop", None, 3, 2)]
    assert (stream.num_prompt_tokens, stream.num_output_tokens) == (3, 3)
    assert await do(gate.closed) == (submit.request_id, 1)


async def test_says_what_it_serves(gate: Gate, client: AsyncClient) -> None:
    info = client.info
    assert (info.model, info.max_model_len, info.vocab_size, info.protocol_version) == (MODEL, 512, 1000, 1)


async def test_chats_and_ids_are_prompts_too(gate: Gate, client: AsyncClient) -> None:
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
    messages = [
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
    chat = p.ChatPrompt(
        [p.ChatMessage("user", "Hi"), p.ChatMessage("assistant", "It")],
        False,
        True,
        tools,
        "named",
        "weather",
        False,
        '[{"text":"x"}]',
        '{"enable_thinking":false}',
    )
    stream = client.generate(chat)
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


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, "messages[0].role must be a string, not NoneType"),
        ({"role": "user"}, "messages[0].content must be a string, not NoneType"),
        ({"role": "user", "content": 5}, "messages[0].content must be a string, not int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0] must be a string or {"),
        ({"role": "user", "content": "x", "audio": {}}, "messages[0] has keys that are not supported: audio"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[0].tool_call_id must be a string, not int"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "messages[0].tool_calls[0] must be a dict as {"),
    ],
)
async def test_what_is_no_message_is_said_before_it_is_sent(client: AsyncClient, message: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        client.generate([message])
    assert str(caught.value).startswith(words)


async def test_every_parameter_reaches_the_stages_as_over_http(gate: Gate, client: AsyncClient) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "min_p": 0.125,
        "seed": -1,
        "max_tokens": 9,
        "stop": ["\n", "é"],
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 2,
        "logit_bias": {17: -100, 504: 2.5},
        "allowed_token_ids": [504, 17],
        "bad_words": ["né", "never"],
        "min_tokens": 3,
        "truncate_prompt_tokens": 40,
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    stream = client.generate("Hi", SamplingParams(**fields))
    over_zmq = await do(gate.serve)
    await all_of(stream)
    response = gate.complete({"model": MODEL, "prompt": "Hi", **fields})
    over_http = await do(gate.serve)
    await asyncio.wrap_future(response)
    for name in set(m.Submit.__struct_fields__) - {"request_id", "arrival_s"}:
        assert getattr(over_zmq, name) == getattr(over_http, name), name
    assert over_zmq.sampling.bias_ids == [17, 504]
    assert over_zmq.bad_words == ["né", "never"]
    assert over_zmq.prompt_options == m.PromptOptions(truncate=40, with_pieces=True)


@pytest.mark.parametrize(
    ("given", "over_http"),
    [
        ({"json": {"type": "object"}}, {"json": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["né", "no"]}, {"choice": ["né", "no"]}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structural_tag": {"type": "x"}}, {"structural_tag": '{"type": "x"}'}),
    ],
)
async def test_what_the_output_is_to_match_reaches_the_stages_as_over_http(
    gate: Gate, client: AsyncClient, given: dict[str, Any], over_http: dict[str, Any]
) -> None:
    stream = client.generate("Hi", SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
    submit = await do(gate.serve)
    await all_of(stream)
    response = gate.complete({"model": MODEL, "prompt": "Hi", "structured_outputs": over_http})
    assert submit.grammar is not None
    assert submit.grammar == (await do(gate.serve)).grammar
    await asyncio.wrap_future(response)


async def test_priority_and_salt_reach_the_stages_and_cached_ids_the_client(tmp_path: Path) -> None:
    with Gate(tmp_path, policy="priority") as gate:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            stream = client.generate("Hi", SamplingParams(n=2), priority=-5, cache_salt="tenant é")
            submit = await do(gate.begin)
            assert (submit.priority, submit.cache_salt) == (-5, "tenant é")
            for index, num_cached in enumerate((16, 32)):
                gate.delta(submit, "x", index=index, num_cached=num_cached)
                gate.finish(submit, index=index)
            await all_of(stream)
            assert stream.num_cached_tokens == 16
            response = gate.complete({"model": MODEL, "prompt": "Hi", "priority": 7, "cache_salt": "a"})
            submit = await do(gate.serve)
            assert (submit.priority, submit.cache_salt) == (7, "a")
            assert (await asyncio.wrap_future(response)).status_code == 200


async def test_a_priority_is_refused_where_the_server_has_none(gate: Gate, client: AsyncClient) -> None:
    with pytest.raises(RequestError) as raised:
        await all_of(client.generate("Hi", priority=1))
    assert (raised.value.status, raised.value.param) == (400, "priority")
    for options in ({"priority": 2**31}, {"cache_salt": ""}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            client.generate("Hi", **options)  # type: ignore[arg-type]
    again = client.generate("Hi")
    await do(gate.serve)
    assert [output.text for output in await all_of(again)] == ["Hello"]


async def test_sequences_of_n_come_in_any_order_and_end_once_each(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(n=2))
    submit = await do(gate.begin)
    gate.delta(submit, "b", index=1)
    gate.finish(submit, "a", index=0)
    gate.delta(submit, "c", index=1, finish=m.Finish.LENGTH)
    outputs = await all_of(stream)
    for index, text, reason in ((0, "a", "stop"), (1, "bc", "length")):
        mine = [output for output in outputs if output.index == index]
        assert "".join(output.text for output in mine) == text
        assert [output.finish_reason for output in mine if output.finish_reason] == [reason]


@pytest.mark.parametrize(
    ("params", "prompt", "param"),
    [
        ({"n": 2000}, "Hi", "n"),
        ({"temperature": -1.0}, "Hi", "temperature"),
        ({"top_p": 0.0}, "Hi", "top_p"),
        ({"seed": -(2**63) - 1}, "Hi", "seed"),
        ({"stop": [""]}, "Hi", "stop[0]"),
        ({"repetition_penalty": 0.0}, "Hi", "repetition_penalty"),
        ({"presence_penalty": 2.5}, "Hi", "presence_penalty"),
        ({"frequency_penalty": -2.5}, "Hi", "frequency_penalty"),
        ({"logit_bias": {"x": 1.0}}, "Hi", "logit_bias.x"),
        ({"logit_bias": {"1000": 1.0}}, "Hi", "logit_bias.1000"),
        ({"logit_bias": {"5": 101.0}}, "Hi", "logit_bias.5"),
        ({"logit_bias": {str(i): 1.0 for i in range(1025)}}, "Hi", "logit_bias"),
        ({"allowed_token_ids": []}, "Hi", "allowed_token_ids"),
        ({"allowed_token_ids": [5, 1000]}, "Hi", "allowed_token_ids[1]"),
        ({"bad_words": [""]}, "Hi", "bad_words[0]"),
        ({"bad_words": ["x"] * 1025}, "Hi", "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "Hi", "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "Hi", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 513}, "Hi", "truncate_prompt_tokens"),
        ({"logprobs": -1}, "Hi", "logprobs"),
        ({"logprobs": 21}, "Hi", "logprobs"),
        ({"prompt_logprobs": 21}, "Hi", "prompt_logprobs"),
    ],
)
def test_a_bad_field_is_named_as_over_http(gate: Gate, params: dict[str, Any], prompt: str, param: str) -> None:
    with RawPeer(gate) as peer:
        if param == "seed":
            params = {"seed": 2**64 - 1}  # what MessagePack can't hold is refused by its decoder; this is allowed
            peer.generate(1, prompt, **params)
            assert gate.serve().sampling.seed == 2**64 - 1
            return
        peer.generate(1, prompt, **params)
        failed = peer.hear(p.Failed)
        refused = gate.complete({"model": MODEL, "prompt": prompt, **params}).result()
        assert failed.request_id == 1
        error = refused.json()["error"]
        assert (failed.failure.status, failed.failure.message, failed.failure.param, failed.failure.code) == (
            refused.status_code,
            error["message"],
            error["param"],
            error["code"],
        )
        assert failed.failure.param == param
        assert peer.is_still_served()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_can_not_say_is_refused_by_its_name(gate: Gate, value: float) -> None:
    with RawPeer(gate) as peer:
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for number, name in enumerate(names):
            peer.generate(number, **{name: value})
            failure = peer.hear(p.Failed).failure
            assert (failure.status, failure.param) == (400, name)
        peer.generate(len(names), logit_bias={"5": value})
        assert peer.hear(p.Failed).failure.param == "logit_bias.5"


@pytest.mark.parametrize(
    ("kind", "source", "param"),
    [
        ("json", "", "structured_outputs.json"),
        ("json", "[]", "structured_outputs.json"),
        ("json", '{"x":"' + "x" * 2**17 + '"}', "structured_outputs.json"),
        ("regex", "", "structured_outputs.regex"),
        ("choice", "[]", "structured_outputs.choice"),
        ("choice", '["a', "structured_outputs.choice"),
        ("choice", "[1]", "structured_outputs.choice"),
        ("choice", "[" * 10**5, "structured_outputs.choice"),
        ("grammar", "", "structured_outputs.grammar"),
        ("structural_tag", "5", "structured_outputs.structural_tag"),
        ("json_schema", "{}", "structured_outputs.kind"),
        ("", "", "structured_outputs.kind"),
    ],
)
def test_what_an_output_can_not_match_is_named(gate: Gate, kind: str, source: str, param: str) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, structured_outputs=p.StructuredOutputs(kind, source))
        failure = peer.hear(p.Failed).failure
        assert (failure.status, failure.param) == (400, param)
        assert len(failure.message) < 300
        assert peer.is_still_served()


TOOL = '{"type":"function","function":{"name":"weather"}}'
USER = p.ChatMessage("user", "Hi")


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (p.ChatPrompt([USER], True, True), "continue_final_message"),
        (p.ChatPrompt([USER], tools="{}"), "tools"),
        (p.ChatPrompt([USER], tools=f"[{TOOL}"), "tools"),
        (p.ChatPrompt([USER], tools=f'[{TOOL}],"x":[1]'), "tools"),
        (p.ChatPrompt([USER], tools=f"[{TOOL}]}}"), "tools"),
        (p.ChatPrompt([USER], tools=""), "tools"),
        (p.ChatPrompt([USER], tools="[" * 10**5), "tools"),
        (p.ChatPrompt([USER], tools="[" * 10**5 + "]" * 10**5), "tools"),
        (p.ChatPrompt([USER], tools='[{"type":"function"}]'), "tools[0].function"),
        (p.ChatPrompt([USER], tools='[{"type":"code","function":{"name":"weather"}}]'), "tools[0].type"),
        (p.ChatPrompt([USER], tools=f"[{TOOL},{TOOL}]"), "tools[1].function.name"),
        (p.ChatPrompt([USER], tools=f"[{','.join([TOOL] * 129)}]"), "tools"),
        (p.ChatPrompt([USER], tools=f"[{TOOL}]", tool_choice="any"), "tool_choice"),
        (p.ChatPrompt([USER], tool_choice="required"), "tool_choice"),
        (p.ChatPrompt([USER], tools=f"[{TOOL}]", tool_choice="named", tool_name="x"), "tool_choice"),
        (p.ChatPrompt([USER], documents="{}"), "documents"),
        (p.ChatPrompt([USER], documents="[1]"), "documents[0]"),
        (p.ChatPrompt([USER], chat_template_kwargs="[]"), "chat_template_kwargs"),
        (p.ChatPrompt([USER], chat_template_kwargs='{"a":' * 10**5), "chat_template_kwargs"),
        (p.ChatPrompt([USER, p.ChatMessage("cook", "x")]), "messages[1].role"),
        (p.ChatPrompt([p.ChatMessage("user", None)]), "messages[0].content"),
        (p.ChatPrompt([p.ChatMessage("assistant", None)]), "messages[0].content"),
        (p.ChatPrompt([p.ChatMessage("tool", None, None, [], "c1")]), "messages[0].content"),
        (p.ChatPrompt([p.ChatMessage("user", "x", None, [p.ToolCall("c1", "f", "{}")])]), "messages[0].tool_calls"),
        (p.ChatPrompt([p.ChatMessage("tool", "x")]), "messages[0].tool_call_id"),
        (p.ChatPrompt([USER] * 513), "messages"),
        (p.ChatPrompt([p.ChatMessage("assistant", "x", None, [p.ToolCall("c", "f", "{}")] * 512)]), "messages"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(gate: Gate, chat: p.ChatPrompt, param: str) -> None:
    with RawPeer(gate) as peer:
        peer.say(p.Generate(1, "", chat, p.Params(), 1))
        failure = peer.hear(p.Failed).failure
        assert (failure.status, failure.param) == (400, param)
        assert len(failure.message) < 300
        assert peer.is_still_served()


@pytest.mark.parametrize(("choice", "name"), [("required", ""), ("named", "weather")])
def test_a_call_that_is_insisted_on_is_held_to_its_form_as_over_http(gate: Gate, choice: str, name: str) -> None:
    with RawPeer(gate) as peer:
        chat = p.ChatPrompt([USER], tools=f"[{TOOL}]", tool_choice=choice, tool_name=name)
        peer.say(p.Generate(1, "", chat, p.Params(), 9))
        submit = gate.serve()
        over_http: Any = {"type": "function", "function": {"name": name}} if name else choice
        response = gate.post(CHAT | {"tools": [json.loads(TOOL)], "tool_choice": over_http})
        assert submit.grammar is not None
        assert submit.grammar == gate.serve().grammar
        response.result()
        wanted = p.StructuredOutputs("regex", "a+")
        peer.say(p.Generate(2, "", chat, p.Params(structured_outputs=wanted), 9))
        while not isinstance(message := peer.hear(), p.Failed):
            pass
        assert message.failure.param == "structured_outputs.regex"


def test_a_prompt_that_is_cut_may_be_longer_than_the_model(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        ids = p.TokensPrompt(bytes(4 * 600))
        peer.say(p.Generate(1, "", ids, p.Params(), 1))
        assert peer.hear(p.Failed).failure.code == "context_length_exceeded"
        peer.say(p.Generate(2, "", ids, p.Params(truncate_prompt_tokens=-1), 1))
        assert gate.serve().prompt_options.truncate == -1


def test_a_model_that_is_not_there(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.say(p.Generate(2**64 - 1, "gpt-5", p.TextPrompt("Hi"), p.Params(), 1))
        failed = peer.hear(p.Failed)
        assert (failed.request_id, failed.failure.status, failed.failure.code) == (2**64 - 1, 404, "model_not_found")


async def test_what_ingest_refuses_is_raised_with_its_field(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    submit = await do(gate.submit)
    gate.reject(submit, m.Failure(400, "too long", "prompt", "context_length_exceeded"))
    with pytest.raises(RequestError, match="too long") as raised:
        await all_of(stream)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, "prompt", "context_length_exceeded")


async def test_both_doors_share_the_credits(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_requests=1) as gate:
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
    async def test_gives_what_was_there_and_one_end(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        gate.delta(submit, "Hel")
        assert (await anext(stream)).text == "Hel"
        stream.abort()
        stream.abort()
        assert await all_of(stream) == [Output(0, "", [], "abort", None, 3, 1)]
        abort = await do(gate.rig.receive, "schedule", m.Abort)
        assert abort.request_id == submit.request_id
        gate.finish(submit, "late", finish=m.Finish.ABORT)
        await do(gate.closed)
        assert (await do(gate.rig.load)).num_open_requests == 0

    async def test_before_it_is_accepted(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi", SamplingParams(n=2))
        await do(gate.submit)
        stream.abort()
        assert [(o.index, o.finish_reason) for o in await all_of(stream)] == [(0, "abort"), (1, "abort")]

    def test_of_what_is_unknown_or_over_does_nothing(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.say(p.Abort(99))
            peer.say(p.Credit(99, 5))
            peer.generate(1)
            gate.serve()
            assert isinstance([peer.hear() for _ in range(3)][-1], p.Finished)
            peer.say(p.Abort(1))
            assert peer.is_still_served()
        assert gate.rig.load().num_open_requests == 0

    async def test_a_stream_that_nobody_holds_is_aborted(self, gate: Gate, client: AsyncClient) -> None:
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


class TestClientsThatGo:
    @pytest.mark.parametrize("how", ["bye", "hang up"])
    def test_have_their_requests_aborted_at_once(self, gate: Gate, how: str) -> None:
        with RawPeer(gate) as other:
            other.generate(1)
            kept = gate.begin()
            with RawPeer(gate) as peer:
                peer.generate(1)
                submit = gate.begin()
                peer.hear(p.Accepted)
                if how == "bye":
                    peer.say(p.Bye())
                    assert peer.is_hung_up()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            gate.finish(kept, "x")
            assert [type(other.hear()) for _ in range(3)] == [p.Accepted, p.Delta, p.Finished]

    async def test_a_client_that_closes_raises_in_its_streams(self, gate: Gate) -> None:
        client = await AsyncClient.connect(address_of(gate))
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        await client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await all_of(stream)
        with pytest.raises(ConnectionLost, match="closed"):
            client.generate("Hi")
        assert (await do(gate.rig.receive, "schedule", m.Abort)).request_id == submit.request_id

    def test_a_reset_tcp_connection_is_an_end_too(self, tmp_path: Path) -> None:
        with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{free_port()}") as gate:
            address = gate.rig.settings.gateway.zmq
            with TcpPeer(address) as peer:
                peer.say(HELLO)
                peer.say(p.Generate(1, "", p.TextPrompt("Hi"), p.Params(), 10))
                submit = gate.begin()
                peer.reset()
                assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id


class TestSlowClients:
    def test_without_credit_deltas_merge_and_others_do_not_wait(self, gate: Gate) -> None:
        with RawPeer(gate) as slow, RawPeer(gate) as quick:
            slow.generate(1, num_credits=1)
            first = gate.begin()
            assert isinstance(slow.hear(), p.Accepted)
            gate.delta(first, "a")
            assert slow.hear(p.Delta).outputs[0].text == "a"
            for _ in range(500):
                gate.delta(first, "bc")
            quick.generate(1)
            second = gate.begin()
            gate.finish(second, "x")
            assert [type(quick.hear()) for _ in range(3)] == [p.Accepted, p.Delta, p.Finished]
            gate.finish(first, "d")
            gate.closed()
            assert slow.hears_nothing()
            slow.say(p.Credit(1, 1))
            (output,) = slow.hear(p.Delta).outputs
            assert (output.text, output.text_offset, output.token_offset) == ("bc" * 500 + "d", 1, 1)
            assert output.token_ids == np.arange(1, 502, dtype="<i4").tobytes()
            assert output.finish_reason == "stop"
            assert slow.hear(p.Finished).num_output_tokens == 502

    def test_who_grants_nothing_for_too_long_loses_the_request(
        self, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(zmq_stream, "STALL_S", 0.1)
        with RawPeer(gate) as peer:
            peer.generate(1, num_credits=0)
            submit = gate.begin()
            peer.hear(p.Accepted)
            gate.delta(submit, "a")
            failure = peer.hear(p.Failed).failure
            assert (failure.status, failure.code) == (408, "stalled")
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            gate.finish(submit, finish=m.Finish.ABORT)
            gate.closed()
            assert gate.rig.load().num_open_requests == 0
            assert peer.is_still_served()

    def test_what_a_connection_does_not_take_waits_merged(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        with RawPeer(gate, receive_bound=1) as slow:
            slow.generate(1, num_credits=1_000)
            submit = gate.begin()
            for _ in range(600):
                gate.delta(submit, "x" * 10_000)
                gate.rig.load()
            gate.finish(submit, "end")
            gate.closed()
            texts, num_deltas = "", 0
            slow.hear(p.Accepted)
            while not isinstance(message := slow.hear(), p.Finished):
                texts += message.outputs[0].text
                num_deltas += 1
            assert texts == "x" * 6_000_000 + "end"
            assert num_deltas < 601

    def test_a_connection_that_is_stuck_is_tried_less_and_less_often(
        self, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[str] = []
        send = listener.ZmtpListener.send

        def watched(self: Any, connection: Any, data: bytes) -> Any:
            result = "full" if is_stuck else send(self, connection, data)
            tried.append(result)
            return result

        is_stuck = False
        monkeypatch.setattr(listener.ZmtpListener, "send", watched)
        with RawPeer(gate) as peer:
            for request_id in range(20):
                peer.generate(request_id)
            submits = [gate.begin() for _ in range(20)]
            for _ in submits:
                peer.hear(p.Accepted)
            is_stuck = True
            tried.clear()
            begun = time.monotonic()
            while time.monotonic() < begun + 1.0:
                for submit in submits:
                    gate.delta(submit, "x")
                gate.rig.load()
            assert 3 <= tried.count("full") <= 12, "one attempt for all streams, and ever longer waits"
            is_stuck = False
            for submit in submits:
                gate.finish(submit, "end")
            ended = set()
            while len(ended) < 20:
                message = peer.hear()
                ended |= {message.request_id} if isinstance(message, p.Finished) else set()

    @pytest.mark.parametrize("limit", ["letters", "time"])
    def test_who_reads_nothing_is_hung_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
        if limit == "time":
            monkeypatch.setattr(server_module, "STALL_S", 0.2)
            monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
        else:
            monkeypatch.setattr(server_module, "MAX_PENDING_MESSAGES", 20)
        with Gate(tmp_path) as gate, RawPeer(gate, receive_bound=1) as peer:
            bad = p.Generate(1, "x" * 150, p.TextPrompt("Hi"), p.Params(), 1)
            data, end = msgspec.msgpack.encode(bad), time.monotonic() + PATIENCE_S
            num_sent = num_answers = 0
            while num_sent < 6_000 and peer.socket.poll(500, zmq.POLLOUT):  # else it is not read any more
                peer.socket.send(data)
                num_sent += 1
            while not peer.is_hung_up(0):
                assert time.monotonic() < end, "it is not hung up"
                num_answers += bool(peer.socket.poll(20) and peer.socket.recv())
            assert num_answers < num_sent
            assert_the_door_works(gate)


class TestHostilePeers:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "malformed"),
            (b"\xc1", "malformed"),
            (b"\xff" * 1000, "malformed"),
            (b"\x91" * 5000, "malformed"),
            (msgspec.msgpack.encode(["sing", 1]), "malformed"),
            (msgspec.msgpack.encode({"kind": "hello"}), "malformed"),
            (msgspec.msgpack.encode(["hello", "1", 1]), "hello.min_version"),
            (msgspec.msgpack.encode(["hello", 1]), "malformed"),
            (b"\x94\xa5hello\x01\x01\xa2\xff\xfe", "malformed"),
            (msgspec.msgpack.encode(p.Ping(1)), "must be hello"),
            (msgspec.msgpack.encode(p.Generate(1, "", p.TextPrompt("Hi"), p.Params(), 1)), "must be hello"),
            (msgspec.msgpack.encode(p.Hello(2, 9)), "speaks version 1"),
        ],
    )
    def test_who_begins_badly_is_told_why_and_hung_up(self, gate: Gate, data: bytes, words: str) -> None:
        with RawPeer(gate, hello=False) as peer:
            peer.say(data)
            failure = peer.hear(p.Error).failure
            assert failure.status == 400
            assert words in failure.message
            assert peer.is_hung_up()
        assert_the_door_works(gate)

    @pytest.mark.parametrize(
        ("frames", "words"),
        [
            ((b"garbage",), "malformed"),
            ((HELLO,), "hello was already sent"),
            ((b"", b"\x92\xa4ping\x01"), "use a DEALER"),
            ((msgspec.msgpack.encode(["generate", 1, "", ["text", 5], [], 1]),), "generate.prompt"),
            ((msgspec.msgpack.encode(["generate", -1, "", ["text", ""], [], 1]),), "generate.request_id"),
            (
                (msgspec.msgpack.encode(["generate", 1, "", ["text", ""], [1, "hot"], 1]),),
                "generate.params.temperature",
            ),
            ((msgspec.msgpack.encode(["credit", 1, -5]),), "credit.num_deltas"),
        ],
    )
    def test_who_goes_on_badly_loses_what_is_open(self, gate: Gate, frames: tuple[Any, ...], words: str) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            submit = gate.begin()
            peer.hear(p.Accepted)
            peer.say(*frames)
            assert words in peer.hear(p.Error).failure.message
            assert peer.is_hung_up()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
        assert_the_door_works(gate)

    def test_an_id_that_is_open_can_not_be_used_again(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            gate.begin()
            peer.hear(p.Accepted)
            peer.generate(1)
            assert peer.hear(p.Error).failure.code == "duplicate_id"
            assert peer.is_hung_up()
        assert_the_door_works(gate)

    def test_two_clients_may_use_the_same_ids(self, gate: Gate) -> None:
        with RawPeer(gate) as one, RawPeer(gate) as other:
            one.generate(1)
            first = gate.begin()
            other.generate(1)
            second = gate.begin()
            gate.finish(second, "second")
            gate.finish(first, "first")
            for peer, text in ((one, "first"), (other, "second")):
                peer.hear(p.Accepted)
                assert peer.hear(p.Delta).outputs[0].text == text

    def test_a_message_that_is_too_large_ends_its_connection_and_no_other(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_body_bytes=4096) as gate, RawPeer(gate) as good, RawPeer(gate) as peer:
            assert peer.welcome.max_message_bytes == 4096
            peer.generate(1, "x" * 5000)
            assert peer.is_hung_up()
            assert good.is_still_served()

    def test_a_client_can_not_take_over_another_one_by_its_name(self, gate: Gate) -> None:
        with named_dealer(gate) as one:
            one.send(msgspec.msgpack.encode(HELLO))
            assert one.poll(PATIENCE_S * 1000)
            one.recv()
            with named_dealer(gate) as thief:
                thief.send(msgspec.msgpack.encode(HELLO))
                assert thief.poll(PATIENCE_S * 1000)
                thief.send(msgspec.msgpack.encode(p.Ping(4)))
                thief.send(msgspec.msgpack.encode(p.Bye()))
                assert not one.poll(200)
                one.send(msgspec.msgpack.encode(p.Ping(3)))
                assert one.poll(PATIENCE_S * 1000)
                assert msgspec.msgpack.decode(one.recv()) == ["pong", 3]

    def test_connections_that_say_nothing_are_ended_in_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "HELLO_S", 0.5)
        monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
        num = min(1_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        with Gate(tmp_path) as gate, contextlib.ExitStack() as stack, RawPeer(gate) as good:
            silent = []
            for _ in range(num):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.connect(f"\0pipeline/{gate.address[1]}/door")
                one.settimeout(PATIENCE_S)
                silent.append(one)
            # Half of them greet as ZMTP has it and then say nothing; libzmq would keep those for ever.
            for one in silent[::2]:
                one.sendall(GREETING + READY)
            for one in silent:
                while one.recv(4096):
                    pass  # the server's greeting, then its end
            assert good.is_still_served()

    def test_more_connections_than_it_takes_are_ended_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
        with Gate(tmp_path) as gate, contextlib.ExitStack() as stack:
            served = [stack.enter_context(RawPeer(gate)) for _ in range(3)]
            one = stack.enter_context(RawPeer(gate, hello=False))
            assert one.is_hung_up()
            assert all(peer.is_still_served() for peer in served)
            served[0].__exit__(None, None, None)
            stack.pop_all()
            for peer in served[1:]:
                peer.__exit__(None, None, None)
            one.__exit__(None, None, None)
            until(lambda: is_served(gate), "there is room again")

    def test_who_falls_silent_is_ended_and_who_pings_is_not(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_module, "SILENCE_S", 0.4)
        monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
        with RawPeer(gate) as silent, RawPeer(gate) as lively:
            silent.generate(1)
            submit = gate.begin()
            silent.hear(p.Accepted)
            while silent.hears_nothing(0.05):
                assert lively.is_still_served()
            assert silent.hear(p.Error).failure.code == "silent"
            assert silent.is_hung_up()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            assert lively.is_still_served()

    def test_a_flood_of_pings_leaves_others_their_turn(self, gate: Gate) -> None:
        with RawPeer(gate) as flood, RawPeer(gate) as other:
            ping = msgspec.msgpack.encode(p.Ping(1))
            for _ in range(20_000):
                try:
                    flood.socket.send(ping, zmq.NOBLOCK)
                except zmq.Again:
                    break
            assert other.is_still_served()
        assert_the_door_works(gate)

    def test_whatever_bytes_come_only_their_sender_is_ended(self, gate: Gate) -> None:
        chance = random.Random(5)
        samples = [msgspec.msgpack.encode(message) for message in CLIENT_MESSAGES]
        with RawPeer(gate) as good:
            for _ in range(30):
                data = bytearray(chance.choice(samples))
                for _ in range(chance.randrange(1, 4)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                with RawPeer(gate) as peer:
                    peer.say(bytes(data))
                    peer.say(b"\xc1")
                    assert peer.is_hung_up()
            assert good.is_still_served()
        until(lambda: not is_open(gate), f"all are aborted: {gate.rig.load()}")


class TestTheServersEnd:
    async def test_a_drain_lets_streams_end_and_takes_nobody_new(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        gate.rig.send(m.Drain(30.0))
        await do(gate.rig.load)
        with pytest.raises(RequestError) as raised:
            await all_of(client.generate("Hi"))
        assert (raised.value.status, raised.value.code) == (503, "draining")
        with pytest.raises(RequestError, match="shutting down"):
            await AsyncClient.connect(address_of(gate))
        gate.finish(submit, "end")
        assert [output.text for output in await all_of(stream)] == ["end"]
        await do(gate.rig.receive, "supervisor", m.Drained)

    async def test_at_a_drains_deadline_every_stream_is_closed(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            first = gate.begin()
            peer.generate(2, num_credits=0)
            second = gate.begin()
            gate.finish(second, "nobody reads this")
            assert [type(peer.hear()) for _ in range(2)] == [p.Accepted] * 2
            gate.rig.send(m.Drain(0.05))
            failed = [peer.hear(p.Failed) for _ in range(2)]
            assert {one.request_id for one in failed} == {1, 2}
            assert {one.failure.code for one in failed} == {"shutting_down"}
            gate.finish(first, finish=m.Finish.ABORT)
            gate.rig.receive("supervisor", m.Drained)

    async def test_a_dead_stage_closes_every_stream_with_its_name(self, gate: Gate, client: AsyncClient) -> None:
        streams = [client.generate("Hi") for _ in range(3)]
        submits = [await do(gate.submit) for _ in streams]
        gate.accept(submits[0])
        gate.delta(submits[0], "Hel")
        assert (await anext(streams[0])).text == "Hel"
        gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
        for stream in streams:
            with pytest.raises(RequestError, match=r"stage execute\.0 died: killed by signal 9") as raised:
                await all_of(stream)
            assert raised.value.status == 500
        await do(gate.rig.receive, "supervisor", m.Drained)

    def test_a_dead_stage_closes_what_waits_for_credit_with_its_name_too(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            for request_id in (1, 2):
                peer.generate(request_id, num_credits=0)
                submit = gate.begin()
                peer.hear(p.Accepted)
                if request_id == 1:
                    gate.finish(submit, "nobody reads this")
                    gate.closed()
            gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
            failed = [peer.hear(p.Failed) for _ in range(2)]
            assert {one.request_id for one in failed} == {1, 2}
            assert {(one.failure.status, one.failure.code) for one in failed} == {(500, "stage_died")}
            assert {one.failure.message for one in failed} == {"stage execute.0 died: killed by signal 9"}
            gate.rig.receive("supervisor", m.Drained)

    async def test_stop_closes_what_is_open_and_then_the_connection(self, tmp_path: Path) -> None:
        with Gate(tmp_path) as gate:
            client = await AsyncClient.connect(address_of(gate))
            stream = client.generate("Hi")
            await do(gate.begin)
            await do(stream_ended, gate)
            with pytest.raises(RequestError, match="shutting down"):
                await all_of(stream)
            with pytest.raises(ConnectionLost, match="closed the connection"):
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        client.generate("Hi")
                        await asyncio.sleep(0.01)
            await client.close()

    async def test_a_server_that_says_nothing_is_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "HEARTBEAT_S", 0.05)
        monkeypatch.setattr(server_module, "SILENCE_S", 0.3)
        monkeypatch.setattr(server_module, "SWEEP_S", 1000.0)
        with Gate(tmp_path) as gate:
            async with await AsyncClient.connect(address_of(gate)) as client:
                stream = client.generate("Hi")
                await do(gate.begin)
                monkeypatch.setattr(server_module.ZmqServer, "_handle", lambda *_: None)
                with pytest.raises(ConnectionLost, match=r"has said nothing for 0\.3 s"):
                    await all_of(stream)

    async def test_nobody_there(self) -> None:
        with pytest.raises(ConnectionLost, match=r"no server answered at .* within 0\.1 s"):
            await AsyncClient.connect("ipc://@pipeline/nobody/door", timeout_s=0.1)
        with pytest.raises(ValueError, match="is no address"):
            await AsyncClient.connect("nonsense")

    async def test_before_the_start_it_says_so(self, tmp_path: Path) -> None:
        with Gate(tmp_path, start=False) as gate:
            with pytest.raises(RequestError, match="starting") as raised:
                await AsyncClient.connect(address_of(gate))
            assert raised.value.status == 503


class TestTheBlockingClient:
    def test_streams_aborts_and_closes(self, gate: Gate) -> None:
        with Client(address_of(gate)) as client:
            assert client.info.model == MODEL
            stream = client.generate("Hi", SamplingParams(seed=3))
            gate.serve("Hello")
            assert "".join(output.text for output in stream) == "Hello"
            assert (stream.prompt_token_ids, stream.seed, stream.num_output_tokens) == ([0, 1, 2], 3, 1)
            stream = client.generate("Hi")
            submit = gate.begin()
            stream.accepted()
            gate.delta(submit, "a")
            assert next(stream).text == "a"
            stream.abort()
            assert [output.finish_reason for output in stream] == ["abort"]
            with pytest.raises(RequestError):
                refused = client.generate("Hi")
                gate.reject(gate.submit(), m.Failure(400, "no"))
                list(refused)
        with pytest.raises(ConnectionLost):
            client.generate("Hi")
        client.close()

    def test_one_that_is_dropped_gives_its_connection_and_its_threads_back(self, gate: Gate) -> None:
        client = Client(address_of(gate))
        thread = client._thread
        stream = client.generate("Hi")
        submit = gate.begin()
        del client
        gc.collect()
        stream.accepted()
        gate.delta(submit, "a")
        assert next(stream).text == "a", "a stream holds its client"
        del stream
        gc.collect()
        assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
        until(lambda: thread.is_closed, "the thread has ended")
        until(lambda: not client_threads(), f"no thread is left: {client_threads()}")
        gate.finish(submit, finish=m.Finish.ABORT)

    def test_one_that_is_dropped_in_its_own_thread_is_closed_by_another(self, gate: Gate) -> None:
        clients = [Client(address_of(gate))]
        thread = clients[0]._thread

        async def drop() -> None:
            clients.clear()

        thread.run(drop())
        until(lambda: thread.is_closed, "the thread has ended")
        until(lambda: not client_threads(), f"no thread is left: {client_threads()}")

    def test_one_that_is_never_closed_lets_its_program_end(self, gate: Gate) -> None:
        program = f"from pipeline import Client\nclient = Client({address_of(gate)!r})\nprint(client.info.model)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{MODEL}\n", "")

    def test_nobody_there(self) -> None:
        with pytest.raises(ConnectionLost):
            Client.connect("ipc://@pipeline/nobody/door", timeout_s=0.05)


class TestResuming:
    async def test_the_ids_go_to_the_stages_and_only_what_follows_comes_back(
        self, gate: Gate, client: AsyncClient
    ) -> None:
        stream = client.generate([5, 6], SamplingParams(seed=9, max_tokens=8), received=[20, 21])
        submit = await do(gate.begin)
        assert submit.outputs == [np.array([20, 21], "<i4").tobytes()]
        assert submit.sampling.seed == 9
        gate.continue_at(submit, num_chars=30, num_ids=2)
        gate.delta(submit, "x", 1)
        gate.finish(submit, "y")
        outputs = await all_of(stream)
        assert "".join(output.text for output in outputs) == "xy"
        assert outputs[0].text_offset == 30
        assert outputs[0].token_offset == 2
        assert outputs[-1].finish_reason == "stop"
        assert stream.num_output_tokens == 4

    async def test_each_of_n_has_its_own_ids(self, gate: Gate, client: AsyncClient) -> None:
        client_params = SamplingParams(n=2)
        stream = client.generate("Hi", client_params, received=[[20, 21], []])
        submit = await do(gate.begin)
        assert submit.outputs == [np.array([20, 21], "<i4").tobytes(), b""]
        gate.continue_at(submit, num_chars=5, num_ids=2)
        for index in range(2):
            gate.finish(submit, "z", index)
        outputs = await all_of(stream)
        assert {(output.index, output.text_offset, output.token_offset) for output in outputs} == {(0, 5, 2), (1, 0, 0)}

    @pytest.mark.parametrize(("received", "n"), [([b"abcd"], 2), ([b"abcd", b""], 1), ([b"abc"], 1)])
    def test_what_does_not_fit_is_refused(self, gate: Gate, received: list[bytes], n: int) -> None:
        with RawPeer(gate) as peer:
            peer.say(p.Generate(1, "", p.TextPrompt("Hi"), p.Params(n=n), 10, received))
            failure = peer.hear(p.Failed).failure
            assert failure.status == 400
            assert (failure.param or "").startswith("received")

    async def test_the_client_says_so_before_it_sends(self, client: AsyncClient) -> None:
        with pytest.raises(ValueError, match="each of n = 2"):
            client.generate("Hi", SamplingParams(n=2), received=[1])
        with pytest.raises(TypeError, match="integers"):
            client.generate(["a", 1])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="2147483647"):
            client.generate([2**31])
        with pytest.raises(ValueError, match="bytes"):
            client.generate("x" * 5_000_000)


# ------------------------------------------------------------------------------------------------------------- tools

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0, no security."""
_PROPERTY = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = bytes([4, len(_PROPERTY) + 6]) + b"\x05READY" + _PROPERTY


class TcpPeer:
    """ZMTP by hand over TCP, to be reset."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._socket.sendall(GREETING + READY)
        heard = b""
        while b"READY" not in heard:  # libzmq takes no message before it has said so itself
            heard += self._socket.recv(4096)

    def say(self, message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(bytes([0, len(data)]) + data)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def __enter__(self) -> "TcpPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@contextlib.contextmanager
def named_dealer(gate: Gate) -> Iterator[Any]:
    """A client that chooses its routing id itself."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"me")
        dealer.connect(address_of(gate))
        yield dealer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def assert_the_door_works(gate: Gate) -> None:
    assert is_served(gate)


def is_served(gate: Gate) -> bool:
    """Whether a new client is."""
    with RawPeer(gate, hello=False) as peer:
        peer.say(HELLO)
        return bool(peer.socket.poll(1000)) and isinstance(peer.hear(), p.Welcome)


def is_open(gate: Gate) -> bool:
    """Play stages that end what is aborted; whether anything is open then."""
    while not gate.rig.nothing("ingest", 0):
        message = gate.rig.receive("ingest")
        for index in range(message.n if isinstance(message, m.Submit) else 0):
            gate.finish(message, index=index, finish=m.Finish.ABORT)
    return bool(gate.rig.load().num_open_requests)


def stream_ended(gate: Gate) -> None:
    gate.rig.send(m.Stop())
