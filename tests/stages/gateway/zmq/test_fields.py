"""Fields have the same effect and the same errors as over HTTP."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.errors import RequestError
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.inputs.structured_params import StructuredOutputsParams
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, MODEL, Gate
from tests.stages.gateway.peers import (
    RawPeer,
    address_of,
    all_of,
    do,
)
from tests.zmq_requests import call, chat, generate, named


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, "messages[0].role must be a string, not NoneType"),
        ({"role": "user"}, "messages[0].content must be a string, not NoneType"),
        ({"role": "user", "content": 5}, "messages[0].content must be a string, not int"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0] must be a string or {"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0] must be a dict such as {"),
        ({"role": "user", "content": "x", "audio": {}}, "messages[0] has keys that are not supported: audio"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[0].tool_call_id must be a string, not int"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "messages[0].tool_calls[0] must be a dict such as {"),
    ],
)
async def test_an_invalid_message_is_reported_before_sending(client: AsyncClient, message: Any, words: str) -> None:
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
        "truncation_side": "right",
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
    assert over_zmq.options.bias_ids == [17, 504]
    assert over_zmq.options.bad_words == ["né", "never"]
    assert over_zmq.prompt_options == m.PromptOptions(truncate=40, with_pieces=True, truncates_right=True)


async def test_the_side_on_which_an_embedding_s_prompt_is_cut_reaches_the_stages(
    gate: Gate, client: AsyncClient
) -> None:
    client.embed("Hi", PoolingParams(truncate_prompt_tokens=5, truncation_side="right"))
    submit = await do(gate.submit)
    assert submit.prompt_options == m.PromptOptions(truncate=5, truncates_right=True)


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
async def test_structured_outputs_reach_the_stages_as_over_http(
    gate: Gate, client: AsyncClient, given: dict[str, Any], over_http: dict[str, Any]
) -> None:
    stream = client.generate("Hi", SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
    submit = await do(gate.serve)
    await all_of(stream)
    response = gate.complete({"model": MODEL, "prompt": "Hi", "structured_outputs": over_http})
    assert submit.options.grammar is not None
    assert submit.options.grammar == (await do(gate.serve)).options.grammar
    await asyncio.wrap_future(response)


async def test_priority_and_salt_reach_the_stages_and_cached_tokens_the_client(tmp_path: Path) -> None:
    with Gate(tmp_path, policy="priority") as gate:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            stream = client.generate("Hi", SamplingParams(n=2), priority=-5, cache_salt="tenant é")
            submit = await do(gate.begin)
            assert (submit.options.priority, submit.options.cache_salt) == (-5, "tenant é")
            for index, num_cached in enumerate((16, 32)):
                gate.delta(submit, "x", index=index, num_cached=num_cached)
                gate.finish(submit, index=index)
            await all_of(stream)
            assert stream.num_cached_tokens == 16
            response = gate.complete({"model": MODEL, "prompt": "Hi", "priority": 7, "cache_salt": "a"})
            submit = await do(gate.serve)
            assert (submit.options.priority, submit.options.cache_salt) == (7, "a")
            assert (await asyncio.wrap_future(response)).status_code == 200


async def test_a_priority_is_rejected_if_the_server_has_none(gate: Gate, client: AsyncClient) -> None:
    with pytest.raises(RequestError) as raised:
        await all_of(client.generate("Hi", priority=1))
    assert (raised.value.status, raised.value.param) == (400, "priority")
    for options in ({"priority": 2**31}, {"cache_salt": ""}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            client.generate("Hi", **options)
    again = client.generate("Hi")
    await do(gate.serve)
    assert [output.text for output in await all_of(again)] == ["Hello"]


async def test_sequences_arrive_in_any_order_and_finish_once_each(gate: Gate, client: AsyncClient) -> None:
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
        ({"truncation_side": "middle"}, "Hi", "truncation_side"),
        ({"logprobs": -1}, "Hi", "logprobs"),
        ({"logprobs": 21}, "Hi", "logprobs"),
        ({"prompt_logprobs": 21}, "Hi", "prompt_logprobs"),
    ],
)
def test_a_bad_field_is_named_as_over_http(gate: Gate, params: dict[str, Any], prompt: str, param: str) -> None:
    with RawPeer(gate) as peer:
        if param == "seed":
            params = {"seed": 2**64 - 1}  # MessagePack's decoder rejects larger numbers
            peer.generate(1, prompt, **params)
            assert gate.serve().options.seed == 2**64 - 1
            return
        peer.generate(1, prompt, **params)
        failed = peer.receive(p.Failed)
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
def test_numbers_that_are_not_finite_are_rejected_by_name(gate: Gate, value: float) -> None:
    with RawPeer(gate) as peer:
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for number, name in enumerate(names):
            params: dict[str, Any] = {name: value}
            peer.generate(number, **params)
            failure = peer.receive(p.Failed).failure
            assert (failure.status, failure.param) == (400, name)
        peer.generate(len(names), logit_bias={"5": value})
        assert peer.receive(p.Failed).failure.param == "logit_bias.5"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"json": ""}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": "5"}, "structured_outputs.json"),
        ({"json": '{"x":'}, "structured_outputs.json"),
        ({"json": '{"x":' * 10**5}, "structured_outputs.json"),
        ({"json": {}}, "structured_outputs.json"),
        ({"json": '{"x":"' + "x" * 2**17 + '"}'}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "a"}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice[0]"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"structural_tag": "5"}, "structured_outputs.structural_tag"),
        ({"json_schema": "{}"}, "structured_outputs"),
        ({"regex": "a", "grammar": "b"}, "structured_outputs"),
        ("{}", "structured_outputs"),
    ],
)
def test_invalid_structured_outputs_are_named(gate: Gate, given: Any, param: str) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, structured_outputs=given)
        failure = peer.receive(p.Failed).failure
        assert (failure.status, failure.param) == (400, param)
        assert len(failure.message) < 300
        assert peer.is_still_served()


def test_a_schema_may_have_the_places_of_http(gate: Gate) -> None:
    """`response_format` and the older names, too."""
    schema = ' {"type":"object"}\n'
    for given in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"guided_json": schema},
        {"structured_outputs": {"json": schema}},
    ):
        with RawPeer(gate) as peer:
            peer.generate(1, **given)
            grammar = gate.serve().options.grammar
            assert grammar is not None and grammar.source == schema.strip()


TOOL = '{"type":"function","function":{"name":"weather"}}'


USER = p.MessageParam("user", "Hi")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (chat([USER], add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
        (chat([USER], tools="{}"), "tools"),
        (chat([USER], tools=f"[{TOOL}"), "tools"),
        (chat([USER], tools=f'[{TOOL}],"x":[1]'), "tools"),
        (chat([USER], tools=f"[{TOOL}]}}"), "tools"),
        (chat([USER], tools=""), "tools"),
        (chat([USER], tools="[" * 10**5), "tools"),
        (chat([USER], tools="[" * 10**5 + "]" * 10**5), "tools"),
        (chat([USER], tools='[{"type":"function"}]'), "tools[0].function"),
        (chat([USER], tools='[{"type":"code","function":{"name":"weather"}}]'), "tools[0].type"),
        (chat([USER], tools=f"[{TOOL},{TOOL}]"), "tools[1].function.name"),
        (chat([USER], tools=f"[{','.join([TOOL] * 129)}]"), "tools"),
        (chat([USER], tools=f"[{TOOL}]", tool_choice="any"), "tool_choice"),
        (chat([USER], tool_choice="required"), "tool_choice"),
        (chat([USER], tools=f"[{TOOL}]", tool_choice=named("x")), "tool_choice"),
        (chat([USER], documents="{}"), "documents"),
        (chat([USER], documents="[1]"), "documents[0]"),
        (chat([USER], chat_template_kwargs="[]"), "chat_template_kwargs"),
        (chat([USER], chat_template_kwargs='{"a":' * 10**5), "chat_template_kwargs"),
        (chat([USER, p.MessageParam("a cook", "x")]), "messages[1].role"),
        (chat([USER, p.MessageParam("function", "x")]), "messages[1].role"),
        (chat([p.MessageParam("user", None)]), "messages[0].content"),
        (chat([p.MessageParam("tool", None, None, [], "c1")]), "messages[0].content"),
        (chat([p.MessageParam("user", "x", None, [call("c1", "f", "{}")])]), "messages[0].tool_calls"),
        (chat([p.MessageParam("tool", "x")]), "messages[0].tool_call_id"),
        (chat([USER] * 513), "messages"),
        (chat([]), "messages"),
        (chat([USER], prompt="Hi"), "messages"),
        ({}, "prompt"),
        ({"prompt": "Hi", "prompt_token_ids": bytes(4)}, "prompt"),
        ({"prompt_token_ids": bytes(5)}, "prompt"),
        ({"prompt_token_ids": "Hi"}, "prompt_token_ids"),
        ({"prompt": "Hi", "tools": chat([], tools="[]")["tools"]}, "tools"),
        ({"messages": [USER], "tools": [{}]}, "tools"),
        (chat([p.MessageParam("assistant", "x", None, [call("c", "f", "{}")] * 512)]), "messages"),
    ],
)
def test_an_invalid_field_of_a_chat_is_named(gate: Gate, prompt: Any, param: str) -> None:
    with RawPeer(gate) as peer:
        peer.send(generate(1, prompt))
        failure = peer.receive(p.Failed).failure
        assert (failure.status, failure.param) == (400, param)
        assert len(failure.message) < 300
        assert peer.is_still_served()


@pytest.mark.parametrize("choice", ["required", named("weather")])
def test_a_required_call_has_the_same_grammar_as_over_http(gate: Gate, choice: Any) -> None:
    with RawPeer(gate) as peer:
        prompt = chat([USER], tools=f"[{TOOL}]", tool_choice=choice)
        peer.send(generate(1, prompt))
        submit = gate.serve()
        response = gate.post(CHAT | {"tools": [json.loads(TOOL)], "tool_choice": choice})
        assert submit.options.grammar is not None
        assert submit.options.grammar == gate.serve().options.grammar
        response.result()
        peer.send(generate(2, prompt, {"structured_outputs": p.StructuredOutputsParam(regex="a+")}))
        while not isinstance(message := peer.receive(), p.Failed):
            pass
        assert message.failure.param == "structured_outputs.regex"


def test_a_truncated_prompt_may_exceed_the_models_maximum(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        ids = bytes(4 * 600)
        peer.send(generate(1, ids, credits=1))
        assert peer.receive(p.Failed).failure.code == "context_length_exceeded"
        peer.send(generate(2, ids, {"truncate_prompt_tokens": -1}, 1))
        assert gate.serve().prompt_options.truncate == -1


def test_an_assistant_s_message_may_have_no_content(gate: Gate) -> None:
    """A reply of ours that was cut before its content is accepted as history."""
    with RawPeer(gate) as peer:
        peer.send(generate(1, chat([USER, p.MessageParam("assistant", None), USER]), credits=1))
        prompt = gate.serve().prompt
        assert isinstance(prompt, m.ChatPrompt)
        assert [one.content for one in prompt.messages][1] == ""
