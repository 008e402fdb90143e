"""Bodies of Ollama's API become the requests that OpenAI's routes make, or are rejected by the field's name."""

import json
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.ollama.fields import OllamaFields
from pipeline.stages.gateway.apis.ollama.names import renamed
from pipeline.stages.gateway.apis.ollama.parsing import parse_embed, parse_embeddings, read_show
from pipeline.stages.gateway.apis.ollama.reply import loaded, reply_fields_of
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions, ParsedRequest
from tests.stages.gateway.apis.ollama.bodies import (
    CHAT,
    DEFAULTS,
    FILLS,
    GENERATE,
    LIMITS,
    PLAIN,
    parse,
    prompt_of,
    refused,
)
from tests.stages.gateway.parsing.bodies import chat, completion

# --------------------------------------------------------------------------------------------------------- the request


def test_the_defaults_are_ollama_s_and_the_reply_is_streamed() -> None:
    for body in (CHAT, CHAT | {"stream": None}):
        parsed = parse(body)
        assert parsed.options == chat(**DEFAULTS).options
        assert parsed.stream and reply_fields_of(parsed) == OllamaFields(route="chat", model="tiny")
    assert not parse(CHAT | {"stream": False}).stream


def test_options_are_the_fields_of_a_chat() -> None:
    shared = {"temperature": 0.5, "top_p": 0.7, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a"]}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    ours = parse(CHAT | {"options": shared | penalties | {"num_predict": 9, "repeat_penalty": 1.2}})
    theirs = chat(**shared, **penalties, max_tokens=9, repetition_penalty=1.2)
    assert (ours.options, ours.seed) == (theirs.options, 7)


@pytest.mark.parametrize(("seed", "expected"), [(-1, None), (None, None), (0, 0), (-2, 2**64 - 2)])
@pytest.mark.parametrize("body", [CHAT, GENERATE, GENERATE | {"raw": True}])
def test_a_seed_of_minus_one_is_random(body: dict[str, Any], seed: int | None, expected: int | None) -> None:
    assert parse(body | {"options": {"seed": seed}}).seed == expected


@pytest.mark.parametrize("body", [CHAT, GENERATE, GENERATE | {"raw": True}])
def test_a_larger_num_predict_than_the_context_is_lowered(body: dict[str, Any]) -> None:
    parsed = parse(body | {"options": {"num_predict": 10**6}})
    assert (parsed.options.max_tokens, parsed.prompt_options.lowers_max_tokens) == (10**6, True)


@pytest.mark.parametrize("num_predict", [0, -1, -2])
def test_no_limit_of_the_output(num_predict: int) -> None:
    assert parse(CHAT | {"options": {"num_predict": num_predict}}).options.max_tokens is None


def test_options_that_do_not_change_the_text_are_ignored() -> None:
    runner = {"num_ctx": 4096, "num_gpu": 1, "use_mmap": True, "mirostat_tau": 3.0, "num_keep": 4, "unheard_of": []}
    ignored = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "repeat_last_n": 64}
    assert parse(CHAT | {"options": runner | ignored}).options == parse(CHAT).options


@pytest.mark.parametrize(("name", "value"), [("mirostat", 1), ("mirostat", False), ("typical_p", 0.7), ("tfs_z", 2)])
def test_options_that_are_not_supported_are_rejected_by_name(name: str, value: Any) -> None:
    error = refused(CHAT | {"options": {name: value}})
    assert (error.status, error.param, error.code) == (400, f"options.{name}", "unsupported")


def test_penalties_count_all_tokens_or_none() -> None:
    penalties = {"repeat_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 1}
    for name in penalties:
        error = refused(CHAT | {"options": {name: penalties[name], "repeat_last_n": 64}})
        assert error.param == "options.repeat_last_n" and "count all tokens" in error.message
    assert parse(CHAT | {"options": penalties | {"repeat_last_n": -1}}).options.repetition_penalty == 1.3
    assert parse(CHAT | {"options": penalties | {"repeat_last_n": 0}}).options == parse(CHAT).options


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "options.temperature"),
        ({"top_p": 0}, "options.top_p"),
        ({"top_k": "40"}, "options.top_k"),
        ({"seed": 2**70}, "options.seed"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"stop": ["a"] * 17}, "options.stop"),
        ({"stop": ""}, "options.stop"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
    ],
)
def test_bad_options_are_rejected_by_name(options: dict[str, Any], param: str) -> None:
    for body in (CHAT, GENERATE, GENERATE | {"raw": True}):
        error = refused(body | {"options": options})
        assert (error.status, error.param) == (400, param) and f"'{param}'" in error.message


def test_the_model_s_name_may_have_a_tag() -> None:
    assert reply_fields_of(parse(CHAT | {"model": "tiny:latest"})) == OllamaFields(route="chat", model="tiny:latest")
    for name in ("Tiny", "TINY:Latest"):  # Ollama ignores the case
        assert reply_fields_of(parse(CHAT | {"model": name})) == OllamaFields(route="chat", model=name)
        assert parse_embed(json.dumps({"model": name, "input": "x"}).encode(), LIMITS).model == "tiny"
    for name in ("tiny:8b", "tiny:latest:latest"):
        error = refused(CHAT | {"model": name})
        assert error.status == 404 and error.message == f"model '{name}' not found; this server has 'tiny'"


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": None}, {"prompt": ""}, {"prompt": None}, {}])
def test_a_request_to_load_the_model_has_no_prompt(body: dict[str, Any]) -> None:
    assert parse({"model": "tiny", "keep_alive": "5m"} | body).prompts == []
    for zero in (0, 0.0, "0", "0s"):
        parsed = parse({"model": "tiny", "keep_alive": zero} | body)
        assert parsed.prompts == []
        reply = json.loads(loaded(reply_fields_of(parsed)))
        assert (reply["done"], reply["done_reason"]) == (True, "unload"), "as Ollama's; nothing is unloaded"
    for wrong in ("soon", "", [], {}, True, "5 m"):
        error = refused({"model": "tiny", "keep_alive": wrong} | body)
        assert (error.status, error.param) == (400, "keep_alive")


def test_keep_alive_has_no_effect_with_a_prompt() -> None:
    for keep_alive in (0, -1, "10m", None):
        assert parse(CHAT | {"keep_alive": keep_alive}) == parse(CHAT)


@pytest.mark.parametrize("field", ["template", "truncate", "shift"])
def test_fields_that_are_not_supported_are_rejected_by_name(field: str) -> None:
    for body in (CHAT, GENERATE):
        error = refused(body | {field: "x" if field == "template" else True})
        assert (error.param, error.code) == (field, "unsupported")
        assert parse(body | {field: "" if field == "template" else False}) == parse(body)
    for field, value in (("context", [1]), ("width", 64), ("images", ["aGk="])):
        assert refused(GENERATE | {field: value}).param == ("images[0]" if field == "images" else field)


def test_logprobs() -> None:
    parsed = parse(CHAT | {"logprobs": True, "top_logprobs": 2})
    assert (parsed.details.num_top, parsed.options.num_logprobs) == (2, 2)
    for body in (CHAT, GENERATE | {"raw": True}):
        assert refused(body | {"top_logprobs": 2}).param == "top_logprobs"


# ------------------------------------------------------------------------------------------------- format and thinking


def test_a_format_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert parse(CHAT | {"format": "json"}).options.grammar == m.Grammar("json_object", "", "response_format")
    grammar = parse(CHAT | {"format": schema}).options.grammar
    assert grammar is not None and (grammar.kind, json.loads(grammar.source)) == ("closed_schema", schema)
    for none in ("", None):
        assert parse(CHAT | {"format": none}).options.grammar is None
    for bad in ("yaml", 3, [schema]):
        assert refused(CHAT | {"format": bad}).param == "format"


def test_thinking_is_an_argument_of_the_template() -> None:
    def kwargs(think: Any) -> Any:
        text = prompt_of(*CHAT["messages"], think=think).template_kwargs
        return json.loads(text) if text else {}

    assert kwargs(None) == {}
    assert kwargs(True) == {"enable_thinking": True}
    assert kwargs("low") == {"enable_thinking": True, "reasoning_effort": "low"}
    assert kwargs(False) == {"enable_thinking": False, "reasoning_effort": "none"}
    for think, is_shown in ((None, True), (True, True), (False, False)):
        form = parse(CHAT | {"think": think}).reply
        assert form is not None and form.with_reasoning == is_shown
    for wanted in (True, "high"):
        error = refused(CHAT | {"think": wanted}, PLAIN)
        assert error.param == "think" and '"tiny" does not support thinking' in error.message
    assert parse(CHAT | {"think": False}, PLAIN).reply is None
    assert refused(CHAT | {"think": "much"}).param == "think"


# ------------------------------------------------------------------------------------------------------------ generate


def test_a_prompt_is_a_message() -> None:
    parsed = parse(GENERATE | {"system": "Be brief."})
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    assert [(one.role, one.content) for one in prompt.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert parsed.prompt_param == "prompt"


def test_a_raw_prompt_is_a_text() -> None:
    fields = {"options": {"num_predict": 9}, "raw": True, "logprobs": True}
    parsed = parse(GENERATE | fields)
    assert parsed.prompts == [m.TextPrompt("Hi")] and parsed.reply is None
    assert parsed.options == completion(**DEFAULTS, max_tokens=9, logprobs=0).options
    assert parse(GENERATE, PLAIN).prompts == [m.TextPrompt("Hi")], "a model without a chat template"
    for field, value in (("system", "a"), ("think", True), ("suffix", "b")):
        error = refused(GENERATE | {"raw": True, field: value}, LIMITS)
        assert error.param == field and "raw = true" in error.message


def test_a_suffix_needs_a_model_that_fills_in() -> None:
    error = refused(GENERATE | {"suffix": "there"})
    assert (error.status, error.param) == (400, "suffix") and "fill-in-the-middle" in error.message
    parsed = parse(GENERATE | {"suffix": "there"}, FILLS)
    assert parsed.prompts == [m.TextPrompt("<fim_prefix>Hi<fim_suffix>there<fim_middle>")]


@pytest.mark.parametrize(
    ("route", "param", "expected"),
    [
        ("chat", "max_tokens", "options.num_predict"),
        ("chat", "response_format.json_schema.schema", "format"),
        ("chat", "messages[2].content", "messages[2].content"),
        ("chat", "tools[0].function.parameters", "tools[0].function.parameters"),
        ("chat", "continue_final_message", "messages"),
        ("generate", "messages[1].content", "prompt"),
        ("generate", "messages", "prompt"),
        ("embed", "input[1]", "input[1]"),
        ("embeddings", "input", "prompt"),
    ],
)
def test_errors_have_the_names_of_this_api(route: Any, param: str, expected: str) -> None:
    error = renamed(ApiError(503, f"'{param}' is no good", param, "x", 7), OllamaFields(route=route, model="tiny"))
    assert (error.param, error.message) == (expected, f"'{expected}' is no good")
    assert (error.status, error.code, error.retry_after_s) == (503, "x", 7)


# -------------------------------------------------------------------------------------------------- embeddings and show


def test_embeddings() -> None:
    def embed(**fields: Any) -> ParsedRequest:
        return parse_embed(json.dumps({"model": "tiny:latest"} | fields).encode(), LIMITS)

    parsed = embed(input=["a", "b"], dimensions=4, options={"num_ctx": 9}, keep_alive=0)
    assert parsed.prompts == [m.TextPrompt("a"), m.TextPrompt("b")]
    assert (parsed.embedding, parsed.prompt_options.truncate) == (EmbeddingOptions(dimensions=4), -1)
    assert embed(input="a", truncate=False).prompt_options.truncate == 0
    assert embed(input=[]).prompts == embed(input="").prompts == []
    for fields, param in (
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": [1]}, "input[0]"),
        ({}, "input"),
    ):
        with pytest.raises(ApiError) as error:
            embed(**fields)
        assert error.value.param == param
    old = parse_embeddings(b'{"model": "tiny", "prompt": "a"}', LIMITS)
    assert (old.prompts, old.prompt_param) == ([m.TextPrompt("a")], "prompt")
    assert parse_embeddings(b'{"model": "tiny", "prompt": ""}', LIMITS).prompts == []


def test_show_has_an_older_name_of_the_model() -> None:
    assert read_show(b'{"name": "tiny:latest"}', LIMITS).name == "tiny:latest"
    for body, status in ((b"{}", 400), (b'{"model": "x"}', 404), (b'{"name": "x"}', 404)):
        with pytest.raises(ApiError) as error:
            read_show(body, LIMITS)
        assert error.value.status == status


@pytest.mark.parametrize(
    "value", ["5m", "1h30m", "-1", "-1m", "1.5h", ".5s", "0", "1h2m3.5s", "100ms", "7us", "7µs", "1.s"]
)
def test_durations_are_those_of_go(value: str) -> None:
    assert parse(CHAT | {"keep_alive": value}) == parse(CHAT)


@pytest.mark.parametrize("value", ["5x", "1.", "5m5", "-", " 5m", "1.5", "5m ", "٣m", "1" * 300, "1" * 1_000_000 + "x"])
def test_other_texts_are_no_durations(value: str) -> None:
    assert refused(CHAT | {"keep_alive": value}).param == "keep_alive"
