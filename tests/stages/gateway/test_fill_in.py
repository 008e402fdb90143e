"""Filling in the middle: `suffix` of completions, and /infill in llama.cpp's shape."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.infill.parsing import MAX_EXTRA, parse_infill
from pipeline.stages.gateway.apis.openai.parsing import parse_completion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.fill_in import FAMILIES, FillInTokens, find_fill_in_tokens
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from tests.stages.gateway.gate import COMPLETION, END, MODEL, Gate, read_until

QWEN, STARCODER, SANTACODER = FAMILIES[:3]
INFILL: dict[str, Any] = {"input_prefix": "a = ", "input_suffix": "\nb"}


def limits(*added: str) -> RequestLimits:
    tokens = {text: AddedToken(i, text) for i, text in enumerate(added)}
    return RequestLimits(model=MODEL, max_sequences=64, formats=ChatFormats(added=tokens))


FILLS = limits(*SANTACODER[:3])


def completion(limits: RequestLimits = FILLS, **fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode(), limits)


def infill(limits: RequestLimits = FILLS, **fields: Any) -> ParsedRequest:
    return parse_infill(json.dumps(INFILL | fields).encode(), limits)


def prompt_of(parsed: ParsedRequest) -> str:
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.TextPrompt)
    return prompt.text


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(QWEN[:3])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with Gate(tmp_path) as gate:
        yield gate


@pytest.mark.parametrize("tokens", FAMILIES)
def test_the_tokens_of_a_family_are_found(tokens: FillInTokens) -> None:
    assert find_fill_in_tokens(dict.fromkeys((*filter(None, tokens), "<|other|>"))) == tokens
    assert find_fill_in_tokens(dict.fromkeys(tokens[:3])) == FillInTokens(*tokens[:3])
    assert find_fill_in_tokens(dict.fromkeys(tokens[:2])) is None


def test_a_suffix_is_in_the_prompt_of_a_completion() -> None:
    assert prompt_of(completion(suffix="there")) == "<fim-prefix>Hi<fim-suffix>there<fim-middle>"
    two = completion(prompt=["a", "b"], suffix="c").prompts
    assert two == [m.TextPrompt(f"<fim-prefix>{text}<fim-suffix>c<fim-middle>") for text in "ab"]
    assert prompt_of(completion(prompt="", suffix="there")) == "<fim-prefix><fim-suffix>there<fim-middle>"
    for none in ("", None):
        assert completion(limits(), suffix=none) == completion(limits())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_a_suffix_needs_whole_text_without_echo(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        completion(suffix="x", **fields)
    assert (error.value.status, error.value.param) == (400, param) and "'suffix'" in error.value.message


def test_a_model_without_the_tokens_is_named() -> None:
    for call, param in (
        (lambda: completion(limits(), suffix="x"), "suffix"),
        (lambda: infill(limits()), "input_suffix"),
    ):
        with pytest.raises(ApiError) as error:
            call()
        assert (error.value.status, error.value.param, error.value.code) == (400, param, "unsupported")
        assert "the model has no fill-in-the-middle tokens" in error.value.message


def test_the_prompt_of_infill_is_llama_cpp_s() -> None:
    extra = [{"text": "one", "filename": "a.py"}, {"text": "two"}]
    assert prompt_of(infill(prompt="x")) == "<fim-prefix>a = <fim-suffix>\nb<fim-middle>x"
    plain = prompt_of(infill(input_extra=extra))
    assert plain == "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo<fim-prefix>a = <fim-suffix>\nb<fim-middle>"
    files = prompt_of(infill(limits(*STARCODER), input_extra=extra))
    assert files.startswith(
        "<repo_name>myproject\n<file_sep>a.py\none<file_sep>tmp\ntwo<file_sep>filename\n<fim_prefix>a"
    )


def test_options_of_infill_have_llama_cpp_s_names_and_defaults() -> None:
    options = infill().options
    assert (options.temperature, options.top_k, options.top_p, options.max_tokens) == (0.8, 40, 0.95, None)
    assert options.min_p == pytest.approx(0.05)
    options = infill(n_predict=9, temperature=0, repeat_penalty=1.1, stop=["x"], samplers=["top_k"]).options
    assert (options.max_tokens, options.temperature, options.repetition_penalty, options.stop) == (9, 0, 1.1, ["x"])
    assert infill(n_predict=-1, seed=-1).seed is None
    bad: list[tuple[str, Any]] = [
        ("mirostat", 2),
        ("grammar", "root ::= x"),
        ("n_predict", -2),
        ("input_prefix", None),
        ("input_extra", [{"text": "x"}] * (MAX_EXTRA + 1)),
    ]
    for name, value in bad:
        with pytest.raises(ApiError) as error:
            infill(**{name: value})
        assert error.value.param == name


def test_replies_of_infill(gate: Gate) -> None:
    for is_stream in (False, True):
        future = gate.post(INFILL | {"stream": is_stream, "stop": ["!"]}, "/infill")
        submit = gate.begin()
        assert submit.prompt == m.TextPrompt("<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>")
        gate.delta(submit, "1 +", num_cached=2)
        gate.delta(submit, " 2", finish=m.Finish.STOP, stop_reason="!")
        response = future.result()
        assert response.status_code == 200
        texts = response.text.split("\n\n")[:-1] if is_stream else [f"data: {response.text}"]
        *parts, last = [json.loads(text.removeprefix("data: ")) for text in texts]
        assert all(part == {"index": 0, "content": part["content"], "stop": False} for part in parts)
        assert "".join(part["content"] for part in (*parts, last)) == "1 + 2"
        assert (last["stop"], last["stop_type"], last["stopping_word"]) == (True, "word", "!")
        assert [last[f"tokens_{name}"] for name in ("predicted", "evaluated", "cached")] == [2, 3, 2]
        assert (last["timings"]["prompt_n"], last["timings"]["predicted_n"]) == (1, 2)


def test_timings_of_infill_are_those_of_the_prompt_and_of_the_output(gate: Gate) -> None:
    future = gate.post(INFILL, "/infill")
    submit, now_s = gate.begin(), time.monotonic()
    gate.delta(submit, "a", first=m.FirstTimes(0, now_s, now_s + 100, now_s + 110, 0))
    gate.delta(submit, "b", finish=m.Finish.STOP, settled_s=now_s + 130)
    timings = future.result().json()["timings"]
    assert timings["prompt_ms"] == pytest.approx(10e3), "from the first step to the first token"
    assert timings["predicted_ms"] == pytest.approx(20e3), "from the first token to the end"


@pytest.mark.parametrize(
    ("finish", "stop_type"), [(m.Finish.STOP, "eos"), (m.Finish.LENGTH, "limit"), (m.Finish.ABORT, "none")]
)
def test_stop_types(gate: Gate, finish: m.Finish, stop_type: str) -> None:
    future = gate.post(INFILL, "/infill")
    gate.finish(gate.begin(), "x", finish=finish)
    assert future.result().json()["stop_type"] == stop_type


def test_a_stream_of_infill_that_fails_ends_with_an_error(gate: Gate) -> None:
    with gate.raw(INFILL | {"stream": True}, "/infill") as connection:
        submit = gate.begin()
        gate.delta(submit, "x")
        read_until(connection, b'"content":"x"')
        gate.delta(submit, "", num_ids=0, finish=m.Finish.ERROR, error="NaN logits")
        rest = read_until(connection, END)
    assert b'data: {"error":{"message":"the server could not finish this request: NaN logits"' in rest
    assert b'"stop":true' not in rest


def test_an_error_of_a_stage_names_the_field_of_infill(gate: Gate) -> None:
    future = gate.post(INFILL | {"n_predict": 9}, "/infill")
    gate.reject(gate.submit(), m.Failure(400, "too long", "max_tokens", "context_length_exceeded"))
    assert future.result().json()["error"]["param"] == "n_predict"
