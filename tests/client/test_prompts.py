"""Valid prompts, parameters and conversations, and the errors for invalid ones."""

import array
from itertools import islice
from typing import Any

import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.client.client import ServerInfo
from pipeline.client.connection.wire import packed
from pipeline.client.inputs.chat import ChatOptions
from pipeline.client.inputs.prompts import (
    chat_of,
    chat_options_of,
    info_for,
    is_one_conversation,
    is_one_prompt,
    params_for,
    prompt_of,
)
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.errors import PromptError
from tests.zmq_requests import call, chat

INFO = ServerInfo("m", 16, 64, 100, 1, 32, "s", 1000)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ("a text", True),
        ({"prompt": "a text"}, True),
        ([1, 2], True),
        ((1, 2), True),
        (range(3), True),
        (array.array("i", [1]), True),
        (np.array([1, 2]), True),
        ([np.int64(1)], True),
        ([], False),
        (["a", "b"], False),
        ([[1], [2]], False),
        (np.array([[1], [2]]), False),
        (np.array(["a", "b"]), False),
        (iter(["a"]), False),
    ],
)
def test_one_prompt_is_distinguished_from_several(value: Any, is_one: bool) -> None:
    assert is_one_prompt(value) is is_one


@pytest.mark.parametrize(
    "value",
    [[1, 99], (1, 99), range(1, 100, 98), array.array("i", [1, 99]), np.array([1, 99]), {"prompt_token_ids": [1, 99]}],
)
def test_token_ids_are_accepted_in_many_types(value: Any) -> None:
    assert prompt_of(value, "prompt", INFO) == ({"prompt_token_ids": packed([1, 99])}, None, None)


@pytest.mark.parametrize("value", ["ünï", {"prompt": "ünï"}, ""])
def test_texts_are_sent_unchanged(value: Any) -> None:
    text = value["prompt"] if isinstance(value, dict) else value
    assert prompt_of(value, "prompt", INFO) == ({"prompt": text}, text, None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "prompts[3] must be a text or a list of token ids, not None"),
        (b"text", "prompts[3] must be a text or a list of token ids, not b'text'"),
        (7, "prompts[3] must be a text or a list of token ids, not 7"),
        ([], "prompts[3] is empty: give at least one token id"),
        ([1, "2"], "prompts[3][1] must be a token id, not '2'"),
        ([True], "prompts[3][0] must be a token id, not True"),
        ([1, 2.0], "prompts[3][1] must be a token id, not 2.0"),
        ([1, 100], "prompts[3][1]: token id 100 is out of vocabulary, the model's ids are 0..99"),
        ([-1], "prompts[3][0]: token id -1 is out of vocabulary, the model's ids are 0..99"),
        ([2**40], f"prompts[3][0]: token id {2**40} is out of vocabulary, the model's ids are 0..99"),
        (
            [1] * 16,
            "prompts[3] has 16 token ids; the maximum is 15, which leaves room for one output token",
        ),
        ("a\ud800", "prompts[3] contains a lone surrogate, which is not a valid character"),
        ("x" * 1001, "prompts[3] has 1001 bytes; this server accepts at most 1000"),
        ({"text": "a"}, "prompts[3] has keys that are not supported: text"),
        ({}, 'prompts[3] is a dict without the key "prompt" or "prompt_token_ids"'),
        (
            {"prompt_token_ids": [1, 100]},
            "prompts[3]['prompt_token_ids'][1]: token id 100 is out of vocabulary, the model's ids are 0..99",
        ),
        ({"prompt": {"prompt": 1}}, "prompts[3]['prompt']['prompt'] must be a text or a list of token ids, not 1"),
    ],
)
def test_an_invalid_prompt_is_reported_with_its_index(value: Any, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        prompt_of(value, "prompts[3]", INFO)
    assert str(caught.value) == words


def test_token_ids_that_the_server_truncates_may_exceed_the_maximum() -> None:
    ids = [1] * 100
    with pytest.raises(PromptError, match=r"^prompt has 100 token ids; the maximum is"):
        prompt_of(ids, "prompt", info_for(SamplingParams(), INFO))
    cut = SamplingParams(truncate_prompt_tokens=5)
    assert prompt_of(ids, "prompt", info_for(cut, INFO)).prompt == {"prompt_token_ids": packed(ids)}


def test_an_error_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(PromptError) as caught:
        prompt_of([["x" * 10**6]] * 10**6, "prompt", INFO)
    assert len(str(caught.value)) < 300


def test_one_conversation_is_distinguished_from_several() -> None:
    message = {"role": "user", "content": "Hi"}
    assert is_one_conversation([message])
    assert not is_one_conversation([[message]])
    assert not is_one_conversation([])


def test_a_conversation_is_sent_unchanged() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
    ]
    assert chat_of(messages, "messages", ChatOptions(False), INFO).prompt == chat(
        [
            p.MessageParam("system", "Be brief."),
            p.MessageParam("user", [p.ContentPart("text", "a"), p.ContentPart("text", "b")], "Ann"),
        ],
        add_generation_prompt=False,
        continue_final_message=False,
    )


def test_a_conversation_with_tools_is_sent_unchanged() -> None:
    weather = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Athén"}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [weather], "reasoning": "Look."},
        {"role": "tool", "content": "31 °C", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "No.",
            "reasoning_content": "31 is warm.",
            "refusal": None,
            "tool_calls": None,
        },
    ]
    without_id = {"id": None, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages += [
        {"role": "assistant", "content": None, "reasoning": "A reply that ended within it"},
        {"role": "assistant", "content": None, "tool_calls": [without_id]},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    options = chat_options_of(False, True, tools, {"enable_thinking": False})
    assert chat_of(messages, "messages", options, INFO).prompt == chat(
        [
            p.MessageParam("assistant", None, None, [call("c1", "weather", '{"city": "Athén"}')], None, "Look."),
            p.MessageParam("tool", "31 °C", None, None, "c1"),
            p.MessageParam("assistant", "No.", None, None, None, "31 is warm."),
            p.MessageParam("assistant", None, None, None, None, "A reply that ended within it"),
            p.MessageParam("assistant", None, None, [call("", "now", "{}")]),
        ],
        add_generation_prompt=False,
        continue_final_message=True,
        tools='[{"type": "function", "function": {"name": "weather"}}]',
        chat_template_kwargs='{"enable_thinking": false}',
    )
    assert chat_options_of(True, False, [], {}) == ChatOptions()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((1, False, None, None), "add_generation_prompt must be True or False, not 1"),
        ((True, True, None, None), "continue_final_message needs add_generation_prompt=False"),
        ((True, False, "weather", None), "tools must be a list of dicts, not 'weather'"),
        ((True, False, [len], None), "tools must be a list of dicts, not [<built-in function len>]"),
        ((True, False, [{"function": {1, 2}}], None), "tools is not valid JSON: "),
        ((True, False, [{"function": "\ud800"}], None), "tools contains a lone surrogate"),
        ((True, False, None, [1]), "chat_template_kwargs must be a dict, not [1]"),
        ((True, False, None, {"x": float("nan")}), "chat_template_kwargs is not valid JSON: "),
    ],
)
def test_an_invalid_chat_option_is_named(options: Any, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        chat_options_of(*options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Hi", "messages must be a list of messages, not 'Hi'"),
        ([], "messages is empty: give at least one message"),
        (["Hi"], 'messages[0] must be a dict such as {"role": "user", "content": "…"}, not \'Hi\''),
        ([{"role": "cook", "content": "x"}], "messages[0]['role'] must be one of system, developer, user, assistant,"),
        ([{"content": "x"}], "messages[0]['role'] must be one of system, developer, user, assistant, tool, not None"),
        ([{"role": "user"}], "messages[0]['content'] must be a text, not None"),
        (
            [{"role": "user", "content": "x", "audio": {}, "refusal": "", "function_call": None}],
            "messages[0] has keys that are not supported: audio, refusal",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": "c1"}], "messages[0]['tool_calls'] must be a list of "),
        (
            [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0]['tool_calls'][0] must be a dict such as {",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c1"}]}],
            "messages[0]['tool_calls'][0] must be a dict such as {",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0]['tool_call_id'] must be a text, not 1"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0]['name'] must be a text, not 1"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0]['content'][0] must be a dict such as {",
        ),
        ([{"role": "user", "content": ["x"]}], "messages[0]['content'][0] must be a dict"),
    ],
)
def test_an_invalid_conversation_is_reported_with_its_index(value: Any, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        chat_of(value, "messages", ChatOptions(), INFO)
    assert str(caught.value).startswith(words)


DEFAULT, OTHER = SamplingParams(), SamplingParams(n=2)


def test_parameters_apply_to_all_prompts_or_to_each() -> None:
    assert list(islice(params_for(None, 2, DEFAULT), 2)) == [DEFAULT, DEFAULT]
    assert list(islice(params_for(OTHER, None, DEFAULT), 2)) == [OTHER, OTHER]
    assert list(islice(params_for([OTHER, None], 2, DEFAULT), 2)) == [OTHER, DEFAULT]
    assert list(islice(params_for((one for one in (OTHER, DEFAULT)), None, DEFAULT), 2)) == [OTHER, DEFAULT]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([OTHER], "sampling_params has 1 entries for 2 prompts: give one, or one for each"),
        ([OTHER, 3], "sampling_params[1] must be SamplingParams, not 3"),
        ({"n": 1}, "sampling_params must be SamplingParams or a list of them, not {'n': 1}"),
        (3, "sampling_params must be SamplingParams or a list of them, not 3"),
    ],
)
def test_invalid_parameters_are_reported_at_once(value: Any, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        params_for(value, 2, DEFAULT)
    assert str(caught.value) == words


def test_too_few_parameters_for_an_iterator_raise_when_they_run_out() -> None:
    params = params_for(iter([OTHER]), None, DEFAULT)
    assert next(params) == OTHER
    with pytest.raises(PromptError, match="has 1 entries, but there are more prompts"):
        next(params)
