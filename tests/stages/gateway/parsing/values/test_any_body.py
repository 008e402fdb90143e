"""Any bytes are parsed or rejected cleanly, and long lists are rejected early."""

import contextlib
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.client import protocol as p
from pipeline.config.settings import GatewaySettings
from pipeline.http_server.apis.openai import error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.bodies import MessagesBody
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.embeddings.parsing import EmbeddingsBody, parse_embeddings
from pipeline.stages.gateway.apis.infill.parsing import parse_infill
from pipeline.stages.gateway.apis.ollama import parsing as ollama
from pipeline.stages.gateway.apis.ollama.bodies import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from pipeline.stages.gateway.apis.openai.invocations import parse_invocation
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion, parse_tokenize
from pipeline.stages.gateway.apis.responses.parsing import read_response
from pipeline.stages.gateway.apis.tokens.parsing import GenerateBody, GenerateSamplingParams, parse_tokens_only
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.bodies import UNSUPPORTED_FIELDS, ChatBody, CompletionBody
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from tests.slices import part_of
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS, refused
from tests.zmq_requests import chat, generate, parsed

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=8
)
BODIES: tuple[Any, ...] = (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    GenerateBody,
    GenerateSamplingParams,
    MessagesBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
names = st.sampled_from(
    sorted(
        {
            *(name for body in BODIES for name in body.__struct_fields__),
            *UNSUPPORTED_FIELDS,
            "role",
            "content",
            "type",
            "text",
        }
    )
)
bodies = st.dictionaries(names, values | st.dictionaries(names, values) | st.lists(st.dictionaries(names, values)))


LONG = "x" * 1_000_000


def parse_response(body: bytes, limits: RequestLimits) -> object:
    return read_response(body, limits, Any, "seed")  # type: ignore[arg-type] # nothing that is stored is asked for


def assert_parsed_or_rejected(body: bytes) -> None:
    for parse in (
        parse_chat,
        parse_completion,
        parse_embeddings,
        parse_tokens_only,
        parse_messages,
        parse_count_tokens,
        ollama.parse_chat,
        ollama.parse_generate,
        ollama.parse_embed,
        parse_infill,
        parse_invocation,
    ):
        try:
            assert isinstance(parse(body, LIMITS), ParsedRequest)
        except ApiError as error:
            assert 400 <= error.status < 500
            assert error.message
            assert json.loads(error_json(error))["error"]["type"] == "invalid_request_error"


class TestAnyBytes:
    @given(st.binary())
    @example(b'{"a":NaN,"b":"\xff"}')
    def test_any_bytes_are_handled(self, body: bytes) -> None:
        assert_parsed_or_rejected(body)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"tools":[{"type":"function","function":{"name":"f","more":"\xff"}}],"messages":[{"role":"user","content":"a"}]}',
            b'{"tools":[{"type":"function","function":{"name":"f"},"\xff":1}],"messages":[{"role":"user","content":"a"}]}',
            b'{"max_tokens":1,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use",'
            b'"id":"t","name":"f","input":{"a":"\xff"}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t"}]}]}',
            b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"function":{"name":"f",'
            b'"arguments":{"a":"\xff"}}}]}]}',
            b'{"prompt":"a","messages":[],"more":{"more":"\xff"}}',
        ],
    )
    def test_bytes_that_are_no_text_are_found_where_nothing_decodes_them(self, body: bytes) -> None:
        for parse in (
            parse_chat,
            parse_completion,
            parse_tokenize,
            parse_messages,
            parse_count_tokens,
            ollama.parse_chat,
        ):
            assert refused(b'{"model":"tiny",' + body[1:], parse).message == "the body is not valid UTF-8"

    @pytest.mark.parametrize(
        ("parse", "body"),
        [
            (ollama.parse_chat, {"messages": [{"role": "user", "content": "a"}], "think": LONG}),
            (ollama.parse_generate, {"prompt": "a", "think": LONG}),
            (parse_response, {"input": "a", "text": {"verbosity": LONG}}),
            (parse_response, {"input": "a", "reasoning": {"effort": LONG}}),
        ],
    )
    def test_an_error_repeats_little_of_a_long_value(self, parse: Any, body: dict[str, Any]) -> None:
        message = refused({"model": "tiny"} | body, parse).message
        assert "xxx" in message and len(message) < 400

    @given(values)
    def test_any_json_is_handled(self, body: Any) -> None:
        assert_parsed_or_rejected(json.dumps(body).encode())

    @settings(max_examples=part_of(40, 15))
    @given(bodies)
    def test_any_field_value_is_handled(self, fields: dict[str, Any]) -> None:
        for base in (
            CHAT,
            COMPLETION,
            CHAT | {"max_tokens": 1},
            {"token_ids": [1], "sampling_params": fields},
            {"model": "tiny", "input": "x"},
            CHAT | {"options": fields},
        ):
            assert_parsed_or_rejected(json.dumps(base | fields).encode())

    @given(st.binary(min_size=1, max_size=4), st.integers(min_value=0))
    def test_a_corrupted_request_is_handled(self, garbage: bytes, index: int) -> None:
        body = json.dumps(CHAT | {"temperature": 0.5, "stop": ["a"]}).encode()
        index %= len(body)
        assert_parsed_or_rejected(body[:index] + garbage + body[index + len(garbage) :])


class TestTooManyItems:
    """A body within the size limit may contain a million items; they are counted before each is processed."""

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
    def test_too_many_prompts_or_ids_are_rejected_by_name(
        self, body: Any, param: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def packed(ids: Any) -> bytes:
            raise AssertionError("rejected prompts must not be processed")

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

    def test_a_prompt_of_the_maximum_length_is_accepted(self) -> None:
        body = json.dumps(COMPLETION | {"prompt": [1] * 512}).encode()
        assert parse_completion(body, self.LIMITS).prompts == [m.IdsPrompt(np.full(512, 1, "<i4").tobytes())]

    def test_too_many_messages_are_rejected_by_name(self) -> None:
        messages = [{"role": "user", "content": ""}]
        for num, is_refused in ((512, False), (513, True), (100_000, True)):
            body = json.dumps({"model": "tiny", "messages": messages * num}).encode()
            message = generate(1, chat([p.MessageParam("user", "")] * num))
            parsers: list[tuple[Callable[[Any, RequestLimits], ParsedRequest], Any]] = [
                (parse_chat, body),
                (parsed, message),
            ]
            for parse, what in parsers:
                if not is_refused:
                    (prompt,) = parse(what, self.LIMITS).prompts
                    assert isinstance(prompt, m.ChatPrompt) and len(prompt.messages) == num
                    continue
                with pytest.raises(ApiError) as raised:
                    parse(what, self.LIMITS)
                assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")
                assert f"the chat has {num} messages" in raised.value.message

    def test_too_many_ids_over_zeromq_are_rejected(self) -> None:
        with pytest.raises(ApiError, match="the prompt has 513") as raised:
            parsed(generate(1, bytes(4 * 513)), self.LIMITS)
        assert raised.value.param == "prompt"

    def test_too_many_messages_to_tokenize_are_rejected_by_name(self) -> None:
        body = b'{"messages":[%s]}' % b",".join([b'{"role":""}'] * (m.MAX_SHOWN_IDS + 1))
        assert len(body) <= GatewaySettings().max_body_bytes
        error = refused(body, parse_tokenize)
        assert (error.status, error.param) == (400, "messages")
        assert "262144" in error.message

    def test_the_search_for_the_invalid_value_is_bounded(self) -> None:
        for num, param in ((50_000, "prompt[50000]"), (1_000_000, None)):
            body = b'{"model":"tiny","prompt":[%sNaN]}' % (b"[]," * num)
            begin_s = time.process_time()
            error = refused(body, parse_completion)
            assert time.process_time() - begin_s < 2.0
            assert (error.status, error.param) == (400, param)

    def test_garbage_collection_is_enabled_again_afterwards(self) -> None:
        assert gc.isenabled()
        for body in (b"[", b"{}", json.dumps(COMPLETION).encode()):
            with contextlib.suppress(ApiError):
                parse_completion(body, LIMITS)
            assert gc.isenabled()
