"""Invalid values and unsupported fields get an error that names the field."""

import json
import math
import tracemalloc
from typing import Any

import pytest

from pipeline.http_server.apis.openai import error_json
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
from pipeline.stages.gateway.errors import MAX_SHOWN_CHARS
from pipeline.stages.gateway.parsing.bodies import UNSUPPORTED_FIELDS
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS, chat, completion, refused


def message(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [CHAT["messages"][0], {"role": "user", "content": "x"} | fields]}


BAD_CHATS: list[tuple[Any, str | None]] = [
    ({"model": "tiny"}, "messages"),
    (CHAT | {"model": 3}, "model"),
    (CHAT | {"messages": []}, "messages"),
    (CHAT | {"messages": "Hi"}, "messages"),
    (CHAT | {"messages": ["Hi"]}, "messages[0]"),
    (CHAT | {"messages": [{"content": "x"}]}, "messages[0].role"),
    (message(role=""), "messages[1].role"),
    (message(role="the emperor"), "messages[1].role"),
    (message(role="x" * 65), "messages[1].role"),
    (message(role="function"), "messages[1].role"),
    (message(content=None), "messages[1].content"),
    (message(content=5), "messages[1].content"),
    (message(content=["x"]), "messages[1].content[0]"),
    (message(content=[{"text": "x"}]), "messages[1].content[0].type"),
    (message(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (message(content=[{"type": "text", "text": 1}]), "messages[1].content[0].text"),
    (
        message(content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]),
        "messages[1].content[1].image_url.url",
    ),
    (message(name=7), "messages[1].name"),
    (CHAT | {"temperature": -0.1}, "temperature"),
    (CHAT | {"temperature": 2.1}, "temperature"),
    (CHAT | {"temperature": "1"}, "temperature"),
    (CHAT | {"temperature": True}, "temperature"),
    (CHAT | {"top_p": 0}, "top_p"),
    (CHAT | {"top_p": 1.01}, "top_p"),
    (CHAT | {"top_k": -2}, "top_k"),
    (CHAT | {"top_k": 1.5}, "top_k"),
    (CHAT | {"min_p": -0.1}, "min_p"),
    (CHAT | {"min_p": 1.1}, "min_p"),
    (CHAT | {"n": 0}, "n"),
    (CHAT | {"n": 129}, "n"),
    (CHAT | {"n": 65}, "n"),
    (CHAT | {"n": 2.5}, "n"),
    (CHAT | {"max_tokens": 0}, "max_tokens"),
    (CHAT | {"max_tokens": -1}, "max_tokens"),
    (CHAT | {"max_tokens": 10**30}, "max_tokens"),
    (CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT | {"seed": 2**64}, "seed"),
    (CHAT | {"seed": -(2**63) - 1}, "seed"),
    (CHAT | {"seed": "7"}, "seed"),
    (CHAT | {"seed": 0.5}, "seed"),
    (CHAT | {"stop": ""}, "stop"),
    (CHAT | {"stop": "x" * 1025}, "stop"),
    (CHAT | {"stop": 3}, "stop"),
    (CHAT | {"stop": ["x", ""]}, "stop[1]"),
    (CHAT | {"stop": ["x" * 1025]}, "stop[0]"),
    (CHAT | {"stop": ["x"] * 17}, "stop"),
    (CHAT | {"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    (CHAT | {"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    (CHAT | {"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    (CHAT | {"stop_token_ids": [1] * 129}, "stop_token_ids"),
    (CHAT | {"ignore_eos": "yes"}, "ignore_eos"),
    (CHAT | {"stream": 1}, "stream"),
    (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT | {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT | {"temperature": math.nan}, "temperature"),
    (CHAT | {"top_p": math.inf}, "top_p"),
    (CHAT | {"min_p": -math.inf}, "min_p"),
    (CHAT | {"logit_bias": {"5": math.nan}}, "logit_bias.5"),
    (b'{"model": "tiny", "temperature": 1e999, "messages": []}', "temperature"),
    (b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", "seed"),
    ([], None),
    (3, None),
    (b"", None),
    (b"{", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]} x', None),
    (b'{"model": "\xff"}', None),
    (b'{"model": "\\ud800"}', "model"),
    (message(content="x\ud800y"), "messages[1].content"),
    (message(content=[{"type": "text", "text": "\udfff"}]), "messages[1].content[0].text"),
    (CHAT | {"stop": ["\ud83d\ude00", "\ud83d"]}, "stop[1]"),
    (b'{"model": "tiny", "top_logprobs": ' + b"9" * 5000 + b', "messages": []}', "top_logprobs"),
    (b'{"model": "tiny", "logit_bias": {"5": ' + b"9" * 5000 + b'}, "messages": []}', "logit_bias[...]"),
    (b'{"x": ' + b"[" * 100_000, None),
    (b'{"temperature": NaN, "x": ' + b"[" * 100_000, None),
    (b"\x1f\x8b\x08\x00", None),
]

BAD_COMPLETIONS: list[tuple[Any, str]] = [
    ({"model": "tiny"}, "prompt"),
    (COMPLETION | {"prompt": None}, "prompt"),
    (COMPLETION | {"prompt": 3}, "prompt"),
    (COMPLETION | {"prompt": []}, "prompt"),
    (COMPLETION | {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETION | {"prompt": ["a", 1]}, "prompt"),
    (COMPLETION | {"prompt": [1, [1]]}, "prompt"),
    (COMPLETION | {"prompt": [True]}, "prompt[0]"),
    (COMPLETION | {"prompt": [-1]}, "prompt[0]"),
    (COMPLETION | {"prompt": [[0, 2**31]]}, "prompt[0][1]"),
    (COMPLETION | {"prompt": [["a"]]}, "prompt[0][0]"),
    (COMPLETION | {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETION | {"prompt": ["a"] * 65}, "prompt"),
    (COMPLETION | {"prompt": ["a"] * 33, "n": 2}, "prompt"),
    (COMPLETION | {"prompt": [1, math.nan]}, "prompt[1]"),
]


class TestBadInput:
    @pytest.mark.parametrize(("body", "param"), BAD_CHATS)
    def test_an_invalid_chat_names_the_field(self, body: Any, param: str | None) -> None:
        error = refused(body)
        assert (error.status, error.param) == (400, param)
        if param is not None:
            assert f"'{param}'" in error.message or param in error.message

    @pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
    def test_an_invalid_completion_names_the_field(self, body: Any, param: str) -> None:
        error = refused(body, parse_completion)
        assert (error.status, error.param) == (400, param)
        assert param in error.message

    def test_invalid_values_are_reported_with_a_clear_error(self) -> None:
        assert refused(CHAT | {"temperature": "hot"}).message == "'temperature' must be a number or null, not a string"
        assert refused(CHAT | {"n": 0}).message == "'n' must be an integer >= 1"
        assert refused({"model": "tiny"}).message == "'messages' is required"
        assert refused([]).message == "the body must be an object, not an array"
        assert refused(CHAT | {"top_p": math.nan}).message == "'top_p' must be a finite number"
        assert refused(message(content="\ud800")).message == ("'messages[1].content' has a lone surrogate")

    def test_error_messages_are_bounded_in_length(self) -> None:
        for key in ("k" * 100_000, "\ud800" * 1000, "a.b[0]" * 1000):
            error = refused(CHAT | {key: [0, math.nan]})
            assert error.param is not None and len(error.param) <= MAX_SHOWN_CHARS
            assert error.message.startswith(f"'{error.param}' ")
            assert len(error.message) < 2 * MAX_SHOWN_CHARS
            assert json.loads(error_json(error))["error"]["param"] == error.param
        deep: Any = math.inf
        for i in range(200):
            deep = {"key" * i: [deep]}
        assert len(refused(CHAT | {"x": deep}).message) < 2 * MAX_SHOWN_CHARS

    def test_finding_the_invalid_value_takes_little_memory(self) -> None:
        body = json.dumps({"model": "m", "k" * 100_000: [*[0] * 2000, math.nan]}).encode()
        tracemalloc.start()
        try:
            refused(body)
            assert tracemalloc.get_traced_memory()[1] < 20 * len(body)
        finally:
            tracemalloc.stop()

    def test_an_unknown_model_is_404(self) -> None:
        error = refused(CHAT | {"model": "other"})
        assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


UNSUPPORTED: dict[str, Any] = {
    "audio": {"voice": "x"},
    "functions": [{"name": "f"}],
    "suffix": "x",
    "guided_whitespace_pattern": " ",
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True},
    "media_io_kwargs": {"video": {}},
    "mm_processor_kwargs": {"num_crops": 4},
    "repetition_detection": {"max_pattern_size": 4},
    "return_prompt_text": True,
    "return_token_offsets": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}


def test_an_unknown_value_is_reported_with_the_valid_ones() -> None:
    words = "'reasoning_effort' must be one of high, low, max, medium, minimal, none, xhigh, not 'x'"
    error = refused(CHAT | {"reasoning_effort": "x"})
    assert (error.message, error.param, error.code) == (words, "reasoning_effort", "invalid_value")


def test_an_invalid_entry_in_a_truncated_body_names_the_outer_field() -> None:
    error = refused(b'{"logit_bias": {"5": "a"}, ')
    assert error.param == "logit_bias"


class TestUnsupportedFields:
    @pytest.mark.parametrize("name", ["store", "return_prompt_text"])
    def test_fields_that_are_neutral_at_false_are_not_neutral_at_0(self, name: str) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            assert parse(json.dumps(body | {name: False}).encode(), LIMITS)
            error = refused(body | {name: 0}, parse)
            assert (error.param, error.code) == (name, "unsupported")

    def test_fields_that_are_neutral_at_1_are_not_neutral_at_true(self) -> None:
        assert refused(CHAT | {"best_of": True}).param == "best_of"

    def test_fields_of_the_other_endpoint_are_rejected(self) -> None:
        assert refused(CHAT | {"best_of": 5}).param == "best_of"
        assert chat(best_of=1) == chat()
        assert refused(COMPLETION | {"max_completion_tokens": 3}, parse_completion).param == "max_completion_tokens"

    @pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
    def test_unsupported_fields_are_rejected_by_name(self, name: str, value: Any) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            error = refused(body | {name: value}, parse)
            assert (error.status, error.param, error.code) == (400, name, "unsupported")
            assert "not supported" in error.message

    @pytest.mark.parametrize(("name", "values"), UNSUPPORTED_FIELDS.items())
    def test_unsupported_fields_pass_at_their_neutral_values(self, name: str, values: tuple[Any, ...]) -> None:
        for value in values:
            assert chat(**{name: value}) == chat()
            assert completion(**{name: value}) == completion()


@pytest.mark.parametrize("prompt", [None, "", []])
def test_a_missing_prompt_has_one_error_in_the_words_of_vllm(prompt: Any) -> None:
    error = refused(COMPLETION | {"prompt": prompt}, parse_completion)
    assert error.message.startswith("Either prompt or prompt_embeds must be provided and non-empty.")


@pytest.mark.parametrize(
    "body",
    [
        '"logit_bias": {"1": "x"}, "logit_bias": 5',
        '"logit_bias": {"1": "x"}, "logit_bias": [1]',
        '"logit_bias": {"1": "x"}, "logit_bias": {"2": 1}',
        '"logit_bias": {"1": "x"}, "logit_bias": null',
    ],
)
def test_a_repeated_field_of_another_type_names_the_field(body: str) -> None:
    error = refused(f"{json.dumps(CHAT)[:-1]}, {body}}}".encode())
    assert error.param is not None and error.param.startswith("logit_bias")


def test_a_path_of_repeated_fields_is_not_followed() -> None:
    fields = '"sampling_params": {"logit_bias": {"1": "x"}}, "sampling_params": '
    for other in ("5", "{}", '{"logit_bias": 1}', "[]"):
        body = f'{{"model": "tiny", "token_ids": [1], {fields}{other}}}'
        assert refused(body.encode(), parse_tokens_only).param == "sampling_params.logit_bias[...]"[:26]


@pytest.mark.parametrize("value", ["1" * 4000, "-" + "1" * 4000, "1" * 5000, "1e" + "1" * 5000])
@pytest.mark.parametrize(
    "name", ["max_tokens", "seed", "n", "temperature", "top_k", "min_tokens", "logit_bias", "unknown"]
)
def test_numbers_of_thousands_of_digits_are_refused_or_ignored(name: str, value: str) -> None:
    shown = f'{{"1": {value}}}' if name == "logit_bias" else value
    body = f"{json.dumps(CHAT)[:-1]}, {json.dumps(name)}: {shown}}}".encode()
    if name == "unknown":
        parse_chat(body, LIMITS)
    else:
        assert refused(body).status == 400


def test_large_schemas_of_required_calls_are_refused_before_a_grammar_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.text.formats.chat_formats.LarkBuilder.grammar", lambda *_: 1 / 0)
    parameters = {"type": "object", "properties": {"a" * LIMITS.caps.max_grammar_bytes: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = refused(CHAT | {"tools": tools, "tool_choice": choice})
        assert (error.param, error.code) == ("tools", "invalid_grammar") and "limits.max_grammar_bytes" in error.message


def test_the_error_of_a_long_value_names_its_field() -> None:
    """The decoder's message repeats the value, and a search in all of it took 0.1 s for 20 MiB."""
    text = "é" * 100_000
    error = refused({"model": "tiny", "prompt": "a", "prediction": {"type": text, "content": ""}}, parse_completion)
    assert (error.param, error.code) == ("prediction.type", "invalid_value")
    assert len(error.message) < 400
