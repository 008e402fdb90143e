"""A valid body becomes a request with all of its fields."""

import json
import math
from typing import Any

import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.parsing.bodies import UNSUPPORTED_FIELDS, Body, ChatBody, CompletionBody
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS, chat, completion, refused
from tests.zmq_requests import generate, parsed


class TestDefaults:
    def test_defaults_are_those_of_openai(self) -> None:
        parsed = chat()
        assert parsed.options == m.GenerationOptions(
            n=1, max_tokens=None, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0
        )
        assert (parsed.n, parsed.seed, parsed.stream, parsed.include_usage) == (1, None, False, False)
        assert completion().options == m.GenerationOptions(max_tokens=16)

    @pytest.mark.parametrize("fields", [Body, ChatBody, CompletionBody])
    def test_null_is_the_default_of_every_optional_field(self, fields: Any) -> None:
        optional = [name for name in fields.__struct_fields__ if name not in ("model", "messages", "prompt")]
        assert optional
        nulls = dict.fromkeys([*optional, *UNSUPPORTED_FIELDS])
        assert chat(**nulls) == chat()
        assert completion(**nulls) == completion()


class TestFields:
    def test_sampling_reaches_the_executor(self) -> None:
        parsed = chat(temperature=0, top_p=0.5, top_k=7, min_p=0.1, stop_token_ids=[3, 4], ignore_eos=True)
        assert parsed.options == m.GenerationOptions(
            temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, seed=0, stop_token_ids=[3, 4], ignore_eos=True
        )
        assert chat(top_k=-1).options.top_k == 0

    @pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
    def test_a_prediction_reaches_ingest(self, content: Any) -> None:
        prediction = {"type": "content", "content": content}
        assert chat(prediction=prediction).options.prediction == "ab"
        assert completion(prediction=prediction).options.prediction == "ab"
        assert refused(CHAT | {"prediction": {"type": "other", "content": "ab"}}).param == "prediction.type"

    def test_text_options_reach_detokenize(self) -> None:
        parsed = chat(stop="x", include_stop_str_in_output=True, skip_special_tokens=False, stop_token_ids=[3])
        assert parsed.options == m.GenerationOptions(
            stop=["x"], include_stop_str_in_output=True, skip_special_tokens=False, stop_token_ids=[3]
        )
        assert chat(stop=["a", "b"]).options.stop == ["a", "b"]

    @pytest.mark.parametrize(
        ("seed", "key"), [(0, 0), (5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)]
    )
    def test_seeds_are_64_bits_of_either_sign(self, seed: int, key: int) -> None:
        assert chat(seed=seed).seed == key

    def test_max_completion_tokens_overrides_max_tokens(self) -> None:
        assert chat(max_tokens=5).options.max_tokens == 5
        assert chat(max_tokens=5).max_tokens_param == "max_tokens"
        both = chat(max_tokens=5, max_completion_tokens=7)
        assert (both.options.max_tokens, both.max_tokens_param) == (7, "max_completion_tokens")

    def test_usage_is_included_if_requested(self) -> None:
        assert chat(stream=True, stream_options={"include_usage": True}).include_usage

    def test_salt_and_deadline_are_parsed(self) -> None:
        for parse in (chat, completion):
            parsed = parse(cache_salt="é" * 1024, timeout_s=0.5)
            assert (parsed.options.cache_salt, parsed.timeout_s, parsed.options.priority) == ("é" * 1024, 0.5, 0)
            assert (parse().options.cache_salt, parse().timeout_s) == ("", None)

    @pytest.mark.parametrize("priority", [-(2**31), -1, 5, 2**31 - 1])
    def test_priorities_are_accepted_if_the_server_has_them(self, priority: int) -> None:
        limits = RequestLimits("tiny", 64, has_priorities=True)
        for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
            assert parse(json.dumps(body | {"priority": priority}).encode(), limits).options.priority == priority
            assert refused(body | {"priority": priority}, parse).message == (
                f"got priority {priority}, but priorities are disabled: they require schedule.policy = priority"
            )
            assert parse(json.dumps(body | {"priority": 0}).encode(), LIMITS).options.priority == 0

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("priority", 2**31),
            ("priority", -(2**31) - 1),
            ("priority", 1.5),
            ("priority", "high"),
            ("cache_salt", ""),
            ("cache_salt", "x" * 1025),
            ("cache_salt", 5),
            ("timeout_s", 0),
            ("timeout_s", -1),
            ("timeout_s", 1_000_001),
            ("timeout_s", "soon"),
            ("timeout_s", math.nan),
            ("timeout_s", math.inf),
        ],
    )
    def test_an_invalid_priority_salt_or_deadline_is_named(self, field: str, value: Any) -> None:
        for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
            error = refused(body | {field: value}, parse)
            assert (error.status, error.param) == (400, field)

    def test_unknown_fields_are_ignored(self) -> None:
        assert chat(user="me", metadata={"a": "b"}, invented=[1, {"x": None}]) == chat()

    def test_best_of_may_equal_n(self) -> None:
        assert completion(best_of=2, n=2).n == 2


class TestMessages:
    def test_messages_become_the_prompt(self) -> None:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": ""},
        ]
        assert chat(messages=messages).prompts == [
            m.ChatPrompt(
                [
                    m.ChatMessage("system", "Be brief."),
                    m.ChatMessage("user", "a\nb", "Ann", parts=["a", "b"]),
                    m.ChatMessage("assistant", ""),
                ]
            )
        ]

    def test_the_generation_prompt_can_be_omitted(self) -> None:
        (prompt,) = chat(add_generation_prompt=False).prompts
        assert isinstance(prompt, m.ChatPrompt) and not prompt.add_generation_prompt


class TestPrompts:
    def test_text_prompts_are_parsed(self) -> None:
        assert completion(prompt="a").prompts == [m.TextPrompt("a")]
        assert completion(prompt=["a", "b"]).prompts == [m.TextPrompt("a"), m.TextPrompt("b")]

    def test_token_id_prompts_are_parsed(self) -> None:
        def ids(*values: int) -> m.IdsPrompt:
            return m.IdsPrompt(np.array(values, np.int32).tobytes())

        assert completion(prompt=[1, 2]).prompts == [ids(1, 2)]
        assert completion(prompt=[[1], [2, 3]]).prompts == [ids(1), ids(2, 3)]


def test_a_prediction_over_zeromq() -> None:
    prediction = p.Prediction("content", [p.PredictionPart("text", "the "), p.PredictionPart("text", "same")])
    assert parsed(generate(1, "x", prediction=prediction), LIMITS).options.prediction == "the same"
    assert parsed(generate(1, "x"), LIMITS).options.prediction == ""
