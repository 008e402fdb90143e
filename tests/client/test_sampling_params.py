"""Valid sampling parameters, and the errors for invalid ones."""

import subprocess
import sys
from typing import Any

import pytest

import pipeline
from pipeline.client.inputs.sampling_params import SamplingParams


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.stop, params.stop_token_ids) == (None, 16, [], [])
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)


def test_stops_are_stored_as_lists() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    params = SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (["a", "b"], [1, 2])


def test_lists_and_ids_are_normalized() -> None:
    params = SamplingParams(bad_words=("a",), allowed_token_ids=(3, 1), logit_bias={"5": 1, 7: -2.5})  # type: ignore[arg-type, dict-item]
    assert (params.bad_words, params.allowed_token_ids) == (["a"], [3, 1])
    assert params.logit_bias == {5: 1, 7: -2.5}
    assert (SamplingParams().bad_words, SamplingParams().logit_bias, SamplingParams().allowed_token_ids) == (
        [],
        {},
        None,
    )


def test_min_tokens_may_equal_max_tokens() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_parameters_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("use_beam_search", 1, TypeError),
        ("length_penalty", 11, ValueError),
        ("length_penalty", "1", TypeError),
        ("early_stopping", "x", ValueError),
        ("prediction", 5, TypeError),
        ("n", 0, ValueError),
        ("n", 65537, ValueError),
        ("n", 1.0, TypeError),
        ("n", True, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", 2.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("top_p", 0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_k", -2, ValueError),
        ("min_p", float("inf"), ValueError),
        ("seed", 2**64, ValueError),
        ("seed", -(2**63) - 1, ValueError),
        ("max_tokens", 0, ValueError),
        ("max_tokens", "16", TypeError),
        ("stop", "", ValueError),
        ("stop", ["x"] * 4097, ValueError),
        ("stop", "x" * 257, ValueError),
        ("stop", [1], TypeError),
        ("stop", 1, TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", [1] * 4097, ValueError),
        ("stop_token_ids", ["1"], TypeError),
        ("stop_token_ids", 1, TypeError),
        ("ignore_eos", 1, TypeError),
        ("skip_special_tokens", None, TypeError),
        ("spaces_between_special_tokens", None, TypeError),
        ("repetition_penalty", 0, ValueError),
        ("repetition_penalty", float("nan"), ValueError),
        ("repetition_penalty", 101, ValueError),
        ("presence_penalty", 2.1, ValueError),
        ("presence_penalty", "1", TypeError),
        ("frequency_penalty", float("-inf"), ValueError),
        ("logit_bias", [1], TypeError),
        ("logit_bias", {0: 100.5}, ValueError),
        ("logit_bias", {0: float("nan")}, ValueError),
        ("logit_bias", {0: "1"}, TypeError),
        ("logit_bias", {-1: 1}, ValueError),
        ("logit_bias", {"x": 1}, TypeError),
        ("logit_bias", {1.5: 1}, TypeError),
        ("logit_bias", {True: 1}, TypeError),
        ("logit_bias", dict.fromkeys(range(65537), 1), ValueError),
        ("allowed_token_ids", [], ValueError),
        ("allowed_token_ids", [-1], ValueError),
        ("allowed_token_ids", 5, TypeError),
        ("bad_words", "word", TypeError),
        ("bad_words", [""], ValueError),
        ("bad_words", ["x" * 257], ValueError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 17, ValueError),
        ("truncate_prompt_tokens", 0, ValueError),
        ("truncate_prompt_tokens", -2, ValueError),
        ("truncation_side", "middle", ValueError),
        ("truncation_side", 1, ValueError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("prompt_logprobs", 1025, ValueError),
        ("structured_outputs", {"regex": "a"}, TypeError),
    ],
)
def test_an_invalid_field_is_named(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{field}(\[0\])? must "):
        SamplingParams(**{field: value})


def test_public_names_are_loaded_at_first_use() -> None:
    for name in pipeline.__all__:
        assert getattr(pipeline, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = pipeline.nonsense
    code = "import sys, pipeline; assert not {'zmq', 'msgspec', 'asyncio'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
