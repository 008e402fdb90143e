"""The fields of beam search, and the fields that it excludes."""

from typing import Any

import pytest

from pipeline.stages.gateway.apis.openai.parsing import parse_completion
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS, chat, completion, refused
from tests.zmq_requests import generate, parsed

BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}


def test_its_fields_reach_the_options() -> None:
    for one in (chat(**BEAMS), completion(**BEAMS)):
        options = one.options
        assert (options.use_beam_search, options.n) == (True, 3)
        assert (options.length_penalty, options.early_stopping) == (1.0, False)
    options = chat(**BEAMS, length_penalty=0.5, early_stopping="never").options
    assert (options.length_penalty, options.early_stopping) == (0.5, "never")
    assert chat(**BEAMS, early_stopping=True).options.early_stopping is True


def test_sampling_fields_have_no_effect_and_are_allowed() -> None:
    assert chat(**BEAMS, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=4).options.use_beam_search
    assert completion(**BEAMS, best_of=3, stream=True).options.n == 3


def test_without_it_its_fields_are_only_allowed_where_they_do_nothing() -> None:
    assert chat(use_beam_search=False, length_penalty=1, early_stopping=False) == chat()
    for name, value in {"length_penalty": 0.9, "early_stopping": True}.items():
        error = refused(CHAT | {name: value})
        assert (error.param, error.code) == (name, "invalid_value")
        assert "use_beam_search" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [1, 2]),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 1),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_what_changes_the_distribution_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(CHAT | BEAMS | {name: value})
    assert error.param is not None and error.param.startswith(name)
    assert "not allowed together with use_beam_search" in error.message


def test_a_required_tool_call_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    error = refused(CHAT | BEAMS | {"tools": [tool], "tool_choice": "required"})
    assert "use_beam_search" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 11), ("length_penalty", True), ("early_stopping", "x"), ("use_beam_search", 1)],
)
def test_invalid_values_name_the_field(name: str, value: Any) -> None:
    assert refused(CHAT | BEAMS | {name: value}).param == name


def test_best_of_must_be_the_width() -> None:
    assert refused(COMPLETION | BEAMS | {"best_of": 5}, parse_completion).param == "best_of"


def test_over_zeromq() -> None:
    params = {"n": 2, "use_beam_search": True, "length_penalty": 2.0, "early_stopping": "never"}
    options = parsed(generate(1, "x", params, 1), LIMITS).options
    assert (options.use_beam_search, options.length_penalty, options.early_stopping) == (True, 2.0, "never")
    with pytest.raises(ApiError, match="early_stopping"):
        parsed(generate(1, "x", {"use_beam_search": True, "early_stopping": "x"}), LIMITS)
    with pytest.raises(ApiError, match="received"):
        parsed(generate(1, "x", params, 1, [b"\0\0\0\0", b""]), LIMITS)
