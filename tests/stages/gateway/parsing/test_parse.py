"""Whatever the bytes of a body are, they are a request or an error that names the field to blame."""

import contextlib
import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.client import protocol as p
from pipeline.config.settings import GatewaySettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import MAX_SHOWN_CHARS, ApiError
from pipeline.stages.gateway.parsing.bodies import NEUTRAL, Body, ChatBody, CompletionBody
from pipeline.stages.gateway.parsing.embeddings import EmbeddingsBody, parse_embeddings
from pipeline.stages.gateway.parsing.parse import parse_chat, parse_completion, parse_tokenize
from pipeline.stages.gateway.parsing.parse_zmq import parse_generate
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.tokens_only import GenerateBody, GenerateSamplingParams, parse_tokens_only
from tests.stages.gateway.gate import CHAT, COMPLETION

LIMITS = RequestLimits(model="tiny", max_sequences=64)


def chat(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps(CHAT | fields).encode(), LIMITS)


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode(), LIMITS)


def refused(body: Any, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)
    return error.value


class TestDefaults:
    def test_are_those_of_openai(self) -> None:
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
        nulls = dict.fromkeys([*optional, *NEUTRAL])
        assert chat(**nulls) == chat()
        assert completion(**nulls) == completion()


class TestFields:
    def test_sampling_reaches_the_executor(self) -> None:
        parsed = chat(temperature=0, top_p=0.5, top_k=7, min_p=0.1, stop_token_ids=[3, 4], ignore_eos=True)
        assert parsed.options == m.GenerationOptions(
            temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, seed=0, stop_token_ids=[3, 4], ignore_eos=True
        )
        assert chat(top_k=-1).options.top_k == 0

    def test_text_options_reach_detokenize(self) -> None:
        parsed = chat(stop="x", include_stop_str_in_output=True, skip_special_tokens=False, stop_token_ids=[3])
        assert parsed.options == m.GenerationOptions(
            stop=["x"], include_stop=True, skip_special_tokens=False, stop_token_ids=[3]
        )
        assert chat(stop=["a", "b"]).options.stop == ["a", "b"]

    @pytest.mark.parametrize(
        ("seed", "key"), [(0, 0), (5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)]
    )
    def test_seeds_are_64_bits_of_either_sign(self, seed: int, key: int) -> None:
        assert chat(seed=seed).seed == key

    def test_max_completion_tokens_wins(self) -> None:
        assert chat(max_tokens=5).options.max_tokens == 5
        assert chat(max_tokens=5).max_tokens_param == "max_tokens"
        both = chat(max_tokens=5, max_completion_tokens=7)
        assert (both.options.max_tokens, both.max_tokens_param) == (7, "max_completion_tokens")

    def test_usage_is_included_where_it_is_asked_for(self) -> None:
        assert chat(stream=True, stream_options={"include_usage": True}).include_usage

    def test_salts_and_deadlines_go_with_the_request(self) -> None:
        for parse in (chat, completion):
            asked = parse(cache_salt="é" * 1024, timeout_s=0.5)
            assert (asked.options.cache_salt, asked.timeout_s, asked.options.priority) == ("é" * 1024, 0.5, 0)
            assert (parse().options.cache_salt, parse().timeout_s) == ("", None)

    @pytest.mark.parametrize("priority", [-(2**31), -1, 5, 2**31 - 1])
    def test_priorities_are_taken_where_the_server_has_them(self, priority: int) -> None:
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
    def test_what_is_no_priority_salt_or_deadline_is_named(self, field: str, value: Any) -> None:
        for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
            error = refused(body | {field: value}, parse)
            assert (error.status, error.param) == (400, field)

    def test_unknown_fields_are_ignored(self) -> None:
        assert chat(user="me", metadata={"a": "b"}, invented=[1, {"x": None}]) == chat()

    def test_best_of_may_equal_n(self) -> None:
        assert completion(best_of=2, n=2).n == 2


class TestMessages:
    def test_become_the_prompt(self) -> None:
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

    def test_may_be_continued_without_a_generation_prompt(self) -> None:
        (prompt,) = chat(add_generation_prompt=False).prompts
        assert isinstance(prompt, m.ChatPrompt) and not prompt.add_generation_prompt


class TestPrompts:
    def test_text(self) -> None:
        assert completion(prompt="a").prompts == [m.TextPrompt("a")]
        assert completion(prompt=["a", "b"]).prompts == [m.TextPrompt("a"), m.TextPrompt("b")]

    def test_ids(self) -> None:
        def ids(*values: int) -> m.IdsPrompt:
            return m.IdsPrompt(np.array(values, np.int32).tobytes())

        assert completion(prompt=[1, 2]).prompts == [ids(1, 2)]
        assert completion(prompt=[[1], [2, 3]]).prompts == [ids(1), ids(2, 3)]


def message(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [CHAT["messages"][0], {"role": "user", "content": "x"} | fields]}


BAD_CHATS: list[tuple[Any, str | None]] = [
    ({"messages": CHAT["messages"]}, "model"),
    ({"model": "tiny"}, "messages"),
    (CHAT | {"model": 3}, "model"),
    (CHAT | {"model": None}, "model"),
    (CHAT | {"messages": []}, "messages"),
    (CHAT | {"messages": "Hi"}, "messages"),
    (CHAT | {"messages": ["Hi"]}, "messages[0]"),
    (CHAT | {"messages": [{"content": "x"}]}, "messages[0].role"),
    (message(role="emperor"), "messages[1].role"),
    (message(content=None), "messages[1].content"),
    (message(content=5), "messages[1].content"),
    (message(content=["x"]), "messages[1].content[0]"),
    (message(content=[{"text": "x"}]), "messages[1].content[0].type"),
    (message(content=[{"type": "text"}]), "messages[1].content[0].text"),
    (message(content=[{"type": "text", "text": 1}]), "messages[1].content[0].text"),
    (
        message(content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]),
        "messages[1].content[1].type",
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
    (CHAT | {"n": 2.0}, "n"),
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
    def test_of_a_chat_names_the_field(self, body: Any, param: str | None) -> None:
        error = refused(body)
        assert (error.status, error.param) == (400, param)
        if param is not None:
            assert f"'{param}'" in error.message or param in error.message

    @pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
    def test_of_a_completion_names_the_field(self, body: Any, param: str) -> None:
        error = refused(body, parse_completion)
        assert (error.status, error.param) == (400, param)
        assert param in error.message

    def test_is_told_in_the_users_words(self) -> None:
        assert refused(CHAT | {"temperature": "hot"}).message == "'temperature' must be a number or null, not a string"
        assert refused(CHAT | {"n": 0}).message == "'n' must be an integer >= 1"
        assert refused({"model": "tiny"}).message == "'messages' is required"
        assert refused([]).message == "the body must be an object, not an array"
        assert refused(CHAT | {"top_p": math.nan}).message == "'top_p' must be a finite number"
        assert refused(message(content="\ud800")).message == ("'messages[1].content' has a lone surrogate")

    def test_repeats_no_more_of_the_clients_words_than_is_needed(self) -> None:
        for key in ("k" * 100_000, "\ud800" * 1000, "a.b[0]" * 1000):
            error = refused(CHAT | {key: [0, math.nan]})
            assert error.param is not None and len(error.param) <= MAX_SHOWN_CHARS
            assert error.message.startswith(f"'{error.param}' ")
            assert len(error.message) < 2 * MAX_SHOWN_CHARS
            assert json.loads(error.json())["error"]["param"] == error.param
        deep: Any = math.inf
        for i in range(200):
            deep = {"key" * i: [deep]}
        assert len(refused(CHAT | {"x": deep}).message) < 2 * MAX_SHOWN_CHARS

    def test_is_found_without_a_path_for_each_of_its_siblings(self) -> None:
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
    "prediction": {"type": "content"},
    "suffix": "x",
    "logprob_token_ids": [5],
    "truncation_side": "right",
    "guided_whitespace_pattern": " ",
    "use_beam_search": True,
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True},
    "media_io_kwargs": {"video": {}},
    "mm_processor_kwargs": {"num_crops": 4},
    "repetition_detection": {"max_pattern_size": 4},
    "return_prompt_text": True,
    "return_token_offsets": True,
    "thinking_token_budget": 0,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}


def test_a_value_that_is_none_of_a_few_is_told_with_them() -> None:
    words = "'reasoning_effort' must be one of high, low, max, medium, minimal, none, xhigh, not 'x'"
    error = refused(CHAT | {"reasoning_effort": "x"})
    assert (error.message, error.param, error.code) == (words, "reasoning_effort", "invalid_value")


def test_a_wrong_entry_in_a_body_that_breaks_off_is_told_without_its_name() -> None:
    error = refused(b'{"logit_bias": {"5": "a"}, ')
    assert error.param == "logit_bias"


class TestUnsupportedFields:
    @pytest.mark.parametrize("name", ["store", "use_beam_search"])
    def test_that_are_off_at_false_are_not_off_at_0(self, name: str) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            assert parse(json.dumps(body | {name: False}).encode(), LIMITS)
            error = refused(body | {name: 0}, parse)
            assert (error.param, error.code) == (name, "unsupported")

    def test_that_are_off_at_1_are_not_off_at_true(self) -> None:
        assert chat(length_penalty=1.0) == chat(length_penalty=1) == chat()
        assert refused(CHAT | {"length_penalty": True}).param == "length_penalty"

    def test_of_the_other_endpoint_are_refused(self) -> None:
        assert refused(CHAT | {"best_of": 5}).param == "best_of"
        assert chat(best_of=1) == chat()
        assert refused(COMPLETION | {"max_completion_tokens": 3}, parse_completion).param == "max_completion_tokens"

    @pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
    def test_are_refused_by_name(self, name: str, value: Any) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            error = refused(body | {name: value}, parse)
            assert (error.status, error.param, error.code) == (400, name, "unsupported")
            assert "not supported" in error.message

    @pytest.mark.parametrize(("name", "values"), NEUTRAL.items())
    def test_pass_at_their_neutral_values(self, name: str, values: tuple[Any, ...]) -> None:
        for value in values:
            assert chat(**{name: value}) == chat()
            assert completion(**{name: value}) == completion()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=8
)
BODIES: tuple[Any, ...] = (ChatBody, CompletionBody, EmbeddingsBody, GenerateBody, GenerateSamplingParams)
names = st.sampled_from(
    sorted({*(name for body in BODIES for name in body.__struct_fields__), *NEUTRAL, "role", "content", "type", "text"})
)
bodies = st.dictionaries(names, values | st.dictionaries(names, values) | st.lists(st.dictionaries(names, values)))


def is_answered(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_embeddings, parse_tokens_only):
        try:
            assert isinstance(parse(body, LIMITS), ParsedRequest)
        except ApiError as error:
            assert 400 <= error.status < 500
            assert error.message
            assert json.loads(error.json())["error"]["type"] == "invalid_request_error"


class TestAnyBytes:
    @given(st.binary())
    @example(b'{"a":NaN,"b":"\xff"}')
    def test_are_answered(self, body: bytes) -> None:
        is_answered(body)

    @given(values)
    def test_of_json_are_answered(self, body: Any) -> None:
        is_answered(json.dumps(body).encode())

    @given(bodies)
    def test_of_fields_with_any_value_are_answered(self, fields: dict[str, Any]) -> None:
        for base in (CHAT, COMPLETION, {"token_ids": [1], "sampling_params": fields}, {"model": "tiny", "input": "x"}):
            is_answered(json.dumps(base | fields).encode())

    @given(st.binary(min_size=1, max_size=4), st.integers(min_value=0))
    def test_of_a_request_that_was_garbled_are_answered(self, garbage: bytes, place: int) -> None:
        body = json.dumps(CHAT | {"temperature": 0.5, "stop": ["a"]}).encode()
        place %= len(body)
        is_answered(body[:place] + garbage + body[place + len(garbage) :])


class TestWhatIsTooManyWhateverItSays:
    """A legal body may hold a million of something; it is counted before anything is made of each."""

    LIMITS = RequestLimits(model="tiny", max_sequences=64, max_prompt_tokens=512)

    @pytest.mark.parametrize(
        ("body", "param", "words"),
        [
            ({"prompt": [[1]] * 800_000}, "prompt", "800000 prompts × n = 1 sequences exceeds the limit of 64"),
            ({"prompt": ["x"] * 800_000}, "prompt", "800000 prompts × n = 1 sequences exceeds the limit of 64"),
            ({"prompt": [[]] * 800_000}, "prompt", "800000 prompts × n = 1 sequences exceeds the limit of 64"),
            ({"prompt": ["x"] * 33, "n": 2}, "prompt", "33 prompts × n = 2 sequences exceeds the limit of 64"),
            ({"prompt": [1] * 1_500_000}, "prompt", "maximum context length is 512 tokens, and the prompt has 1500000"),
            ({"prompt": [[1], [1] * 513]}, "prompt[1]", "maximum context length is 512 tokens, and the prompt has 513"),
        ],
    )
    def test_of_a_completion_names_the_prompt(
        self, body: Any, param: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def packed(ids: Any) -> bytes:
            raise AssertionError("nothing is to be made of prompts that are refused")

        monkeypatch.setattr("pipeline.stages.gateway.parsing.prompt_fields.packed", packed)
        content = json.dumps({"model": "tiny"} | body, separators=(",", ":")).encode()
        assert len(content) <= GatewaySettings().max_body_bytes
        begin_s = time.process_time()
        with pytest.raises(ApiError) as raised:
            parse_completion(content, self.LIMITS)
        assert time.process_time() - begin_s < 2.0
        assert (raised.value.status, raised.value.param) == (400, param)
        assert words in raised.value.message

    def test_the_setting_to_raise_is_named(self) -> None:
        assert "gateway.max_open_sequences" in refused(COMPLETION | {"n": 65}, parse_completion).message

    def test_a_prompt_that_just_fits_is_ingests_to_judge(self) -> None:
        body = json.dumps(COMPLETION | {"prompt": [1] * 512}).encode()
        assert parse_completion(body, self.LIMITS).prompts == [m.IdsPrompt(np.full(512, 1, "<i4").tobytes())]

    def test_of_a_chat_names_the_messages(self) -> None:
        messages = [{"role": "user", "content": ""}]
        for num, is_refused in ((512, False), (513, True), (100_000, True)):
            body = json.dumps({"model": "tiny", "messages": messages * num}).encode()
            generate = p.Generate(1, "", p.ChatPrompt([p.ChatMessage("user", "")] * num), p.Params(), 1)
            asked: list[tuple[Callable[[Any, RequestLimits], ParsedRequest], Any]] = [
                (parse_chat, body),
                (parse_generate, generate),
            ]
            for parse, what in asked:
                if not is_refused:
                    (prompt,) = parse(what, self.LIMITS).prompts
                    assert isinstance(prompt, m.ChatPrompt) and len(prompt.messages) == num
                    continue
                with pytest.raises(ApiError) as raised:
                    parse(what, self.LIMITS)
                assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")
                assert f"the chat has {num} messages" in raised.value.message

    def test_of_ids_over_zeromq_too(self) -> None:
        generate = p.Generate(1, "", p.TokensPrompt(bytes(4 * 513)), p.Params(), 1)
        with pytest.raises(ApiError, match="the prompt has 513") as raised:
            parse_generate(generate, self.LIMITS)
        assert raised.value.param == "prompt"

    def test_of_a_chat_to_tokenize_names_the_messages(self) -> None:
        body = b'{"messages":[%s]}' % b",".join([b'{"role":""}'] * (m.MAX_SHOWN_IDS + 1))
        assert len(body) <= GatewaySettings().max_body_bytes
        error = refused(body, parse_tokenize)
        assert (error.status, error.param) == (400, "messages")
        assert "262144" in error.message

    def test_the_value_to_blame_is_looked_for_among_so_many_and_no_more(self) -> None:
        for num, param in ((50_000, "prompt[50000]"), (1_000_000, None)):
            body = b'{"model":"tiny","prompt":[%sNaN]}' % (b"[]," * num)
            begin_s = time.process_time()
            error = refused(body, parse_completion)
            assert time.process_time() - begin_s < 2.0
            assert (error.status, error.param) == (400, param)

    def test_garbage_is_collected_again_afterwards(self) -> None:
        assert gc.isenabled()
        for body in (b"[", b"{}", json.dumps(COMPLETION).encode()):
            with contextlib.suppress(ApiError):
                parse_completion(body, LIMITS)
            assert gc.isenabled()
