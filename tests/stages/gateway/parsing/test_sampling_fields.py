"""Sampling fields and token details: the options that they set, and their limits."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing import sampling_fields
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.parsing.token_detail_options import TokenDetailOptions
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS, chat, completion, refused

KNOWN = RequestLimits(model="tiny", max_sequences=64, max_prompt_tokens=512, vocab_size=1000, hidden_size=8)


def refused_by(limits: RequestLimits, body: Any, parse: Any = parse_completion) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(json.dumps(body).encode(), limits)
    return error.value


class TestOptions:
    @pytest.mark.parametrize(
        ("fields", "options"),
        [
            ({"repetition_penalty": 1.2}, m.GenerationOptions(repetition_penalty=1.2)),
            ({"presence_penalty": -2}, m.GenerationOptions(presence_penalty=-2.0)),
            ({"frequency_penalty": 0.5}, m.GenerationOptions(frequency_penalty=0.5)),
            ({"logit_bias": {"5": -100, "0": 1.5}}, m.GenerationOptions(bias_ids=[5, 0], bias_values=[-100.0, 1.5])),
            ({"allowed_token_ids": [7, 3, 7]}, m.GenerationOptions(allowed_ids=np.array([3, 7], "<i4").tobytes())),
        ],
    )
    def test_fields_for_the_executor_are_set(self, fields: dict[str, Any], options: m.GenerationOptions) -> None:
        assert chat(**fields).options == options
        assert completion(**fields).options == msgspec.structs.replace(options, max_tokens=16)

    def test_min_tokens_is_set(self) -> None:
        assert completion(min_tokens=3).options.min_tokens == 3

    def test_bad_words_are_set(self) -> None:
        assert chat(bad_words=["a b", "é"]).options.bad_words == ["a b", "é"]

    def test_prompt_options_for_ingest_are_set(self) -> None:
        assert completion(truncate_prompt_tokens=5).prompt_options == m.PromptOptions(truncate=5)
        assert completion(truncate_prompt_tokens=5, truncation_side="left") == completion(truncate_prompt_tokens=5)
        right = completion(truncate_prompt_tokens=5, truncation_side="right").prompt_options
        assert right == m.PromptOptions(truncate=5, truncates_right=True)
        assert chat(truncate_prompt_tokens=-1, add_special_tokens=True).prompt_options == m.PromptOptions(
            True, truncate=-1
        )
        long = completion_of(KNOWN, prompt=[1] * 5000, truncate_prompt_tokens=9)
        assert len(long.prompts[0].ids) == 20_000

    def test_neutral_fields_change_nothing(self) -> None:
        for value in (True, False):
            assert chat(spaces_between_special_tokens=value) == chat()
        assert chat(guided_decoding_backend="outlines") == chat()
        for fields in ({"repetition_penalty": 1}, {"presence_penalty": 0}, {"logit_bias": {}}, {"bad_words": []}):
            assert chat(**fields) == chat()


def completion_of(limits: RequestLimits, **fields: Any) -> Any:
    return parse_completion(json.dumps(COMPLETION | fields).encode(), limits)


class TestDetails:
    @pytest.mark.parametrize("num_top", [0, 3, 20])
    def test_logprobs_of_ids_are_requested_from_the_stages(self, num_top: int) -> None:
        requests = chat(logprobs=True, top_logprobs=num_top), completion(logprobs=num_top)
        for parsed, max_tokens in zip(requests, (None, 16), strict=True):
            assert parsed.details == TokenDetailOptions(num_top=num_top)
            assert parsed.options == m.GenerationOptions(max_tokens=max_tokens, num_logprobs=num_top, with_pieces=True)
            assert not parsed.prompt_options.with_pieces

    def test_prompt_logprobs_are_requested_from_the_stages(self) -> None:
        for parsed in (chat(prompt_logprobs=2), completion(prompt_logprobs=2)):
            options = parsed.options
            assert (options.num_logprobs, options.num_prompt_logprobs, options.with_pieces) == (-1, 2, True)
            assert parsed.prompt_options.with_pieces

    def test_an_echoed_prompt_requests_the_larger_number_of_logprobs(self) -> None:
        assert completion(echo=True, logprobs=1, prompt_logprobs=4).options.num_prompt_logprobs == 4
        assert completion(echo=True, logprobs=5, prompt_logprobs=4).options.num_prompt_logprobs == 5
        assert completion(echo=True, logprobs=0).options.num_prompt_logprobs == 0
        assert completion(echo=True).options.num_prompt_logprobs == -1

    def test_logprobs_of_only_a_prompt_take_one_step(self) -> None:
        parsed = completion(echo=True, logprobs=0, max_tokens=0)
        assert (parsed.options.max_tokens, parsed.hides_output) == (1, True)
        plain = completion(echo=True, max_tokens=0)
        assert (plain.options.max_tokens, plain.hides_output) == (0, False)

    def test_best_of_requests_logprobs_without_returning_them(self) -> None:
        parsed = completion(best_of=3)
        assert parsed.details == TokenDetailOptions()
        assert not parsed.options.with_pieces and parsed.options.num_logprobs == 0
        assert completion(best_of=3, logprobs=2).options.num_logprobs == 2

    def test_logprobs_are_off_by_default(self) -> None:
        assert chat(logprobs=False) == chat(top_logprobs=0) == chat(logprobs=None) == chat()
        assert chat(logprobs=True) != chat()

    def test_token_id_options_are_set(self) -> None:
        assert chat(return_token_ids=True, return_tokens_as_token_ids=True).details == TokenDetailOptions(
            with_ids=True, names_ids=True
        )

    def test_continuous_usage_requires_include_usage(self) -> None:
        both = {"include_usage": True, "continuous_usage_stats": True}
        assert chat(stream=True, stream_options=both).continuous_usage
        assert not chat(stream=True, stream_options=both | {"include_usage": False}).continuous_usage


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    ({"repetition_penalty": 1e300}, "repetition_penalty", "<= 100"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "a number"),
    ({"presence_penalty": 2.1}, "presence_penalty", "<= 2"),
    ({"presence_penalty": False}, "presence_penalty", "a number"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", ">= -2"),
    ({"logit_bias": [5]}, "logit_bias", "an object"),
    ({"logit_bias": {"4": 1, "504": "a", "6": 2}}, "logit_bias.504", "must be a number, not a string"),
    ({"logit_bias": {"4": 1, "504": None}}, "logit_bias.504", "must be a number, not null"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias.5", "-100 to 100"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "token ids"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05", "token ids"),
    ({"logit_bias": {"٥": 1}}, "logit_bias.٥", "token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias.999", "token ids"),
    ({"logit_bias": {"2147483648": 1}}, "logit_bias.2147483648", "token ids"),
    ({"logit_bias": {"1000": 1}}, "logit_bias.1000", "0..999; vocabulary size 1000"),
    (
        {"logit_bias": {"1000": 1, "5": 1, "1001": 1}},
        "logit_bias",
        "'logit_bias.1000', 'logit_bias.1001': out of vocab",
    ),
    ({"logit_bias": {"a": 1, "5": 1, "-1": 1}}, "logit_bias", "'logit_bias.a', 'logit_bias.-1': keys of"),
    ({"logit_bias": {"5": 101, "6": 1, "7": -101}}, "logit_bias", "'logit_bias.5', 'logit_bias.7' must be a number"),
    ({"logit_bias": {str(i) * 5000: 1 for i in range(9)}}, "logit_bias", "'logit_bias.8888888"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side", "must be one of left, right"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "limits.max_logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
    ({"allowed_token_ids": [1, 1000]}, "allowed_token_ids[1]", "0..999"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ">= 0"),
    ({"bad_words": [""]}, "bad_words[0]", "length >= 1"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]", "length <= 256"),
    ({"bad_words": ["x"] * 1025}, "bad_words", "limits.max_bad_words"),
    ({"stop": ["x"] * 1_000_000}, "stop", "the limit is 16 (limits.max_stop_strings)"),
    ({"stop_token_ids": [1, 1000]}, "stop_token_ids[1]", "0..999"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "limits.max_stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most 5, the maximum number"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "512"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "limits.max_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "an integer"),
    ({"return_token_ids": 1}, "return_token_ids", "true or false"),
    ({"n": 129}, "n", "limits.max_n"),
    ({"seed": 2**64}, "seed", "64-bit"),
]


class TestInvalidValues:
    @pytest.mark.parametrize(("fields", "param", "words"), BAD)
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            error = refused_by(KNOWN, body | fields, parse)
            assert error.status == 400
            assert error.param == param or (error.param or "").startswith(param + "9")
            assert words in error.message

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"logprobs": 1}, "logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
            ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
            ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ],
    )
    def test_invalid_logprobs_of_a_chat_are_named(self, fields: dict[str, Any], param: str) -> None:
        assert refused(CHAT | fields).param == param

    @pytest.mark.parametrize("logprobs", [True, False, -1, 21, 1.5, "2"])
    def test_invalid_logprobs_of_a_completion_are_named(self, logprobs: Any) -> None:
        assert refused(COMPLETION | {"logprobs": logprobs}, parse_completion).param == "logprobs"

    def test_an_echoed_prompt_cannot_be_truncated(self) -> None:
        error = refused(COMPLETION | {"echo": True, "truncate_prompt_tokens": 3}, parse_completion)
        assert error.param == "truncate_prompt_tokens"

    def test_caps_come_from_the_settings(self) -> None:
        caps = Caps(max_n=2, max_best_of=3, max_logprobs=1, max_stop_strings=1, max_bad_words=1, max_prompt_bytes=1024)
        limits = msgspec.structs.replace(LIMITS, caps=caps)
        for fields, param in (
            ({"n": 3}, "n"),
            ({"best_of": 4}, "best_of"),
            ({"logprobs": 2}, "logprobs"),
            ({"stop": ["a", "b"]}, "stop"),
            ({"bad_words": ["a", "b"]}, "bad_words"),
            ({"prompt": "é" * 513}, "prompt"),
            ({"prompt": ["a", "b" * 1025]}, "prompt[1]"),
        ):
            assert refused_by(limits, COMPLETION | fields).param == param
        assert completion_of(limits, n=2, best_of=3, logprobs=1, prompt="é" * 512, stop=["a"]).n == 2
        long = [{"role": "user", "content": "x" * 1000}, {"role": "user", "content": "x" * 25}]
        assert refused_by(limits, CHAT | {"messages": long}, parse_chat).param == "messages"
        raised = msgspec.structs.replace(LIMITS, caps=Caps(max_stop_strings=100, max_logprobs=50))
        assert completion_of(raised, stop=["a"] * 100, logprobs=50).details.num_top == 50


def test_allowed_ids_are_bounded_over_all_sequences() -> None:
    options = m.GenerationOptions(allowed_ids=np.arange(2**18, dtype="<i4").tobytes())
    sampling_fields.check_num_allowed(options, 4)
    with pytest.raises(ApiError, match="for each of 5 sequences") as error:
        sampling_fields.check_num_allowed(options, 5)
    assert (error.value.status, error.value.param) == (400, "allowed_token_ids")


def test_too_many_allowed_ids_are_refused_before_they_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    most = sampling_fields.MAX_ALLOWED
    monkeypatch.setattr(np, "unique", None)
    error = refused_by(LIMITS, COMPLETION | {"allowed_token_ids": [1] * (most + 1)})
    assert (error.status, error.param) == (400, "allowed_token_ids")
    assert f"has {most + 1} entries, and at most {most} are allowed" in error.message
