"""The limit of the reasoning, in every dialect, and where it is refused."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.parsing import parse_messages
from pipeline.stages.gateway.apis.ollama.parsing import parse_chat as parse_ollama
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.apis.responses.parsing import parse_response
from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from tests.stages.gateway.apis.responses.parsed import Stored

THINKING = ChatFormats.of("", ChatSettings(reasoning_parser="qwen3"), [AddedToken(5, "<|im_end|>", True)])
LIMITS = RequestLimits("tiny", 64, max_prompt_tokens=1000, formats=THINKING)
PLAIN = RequestLimits("tiny", 64, max_prompt_tokens=1000, formats=ChatFormats())
USER = [{"role": "user", "content": "Hi"}]


def chat(limits: RequestLimits = LIMITS, **fields: Any) -> m.GenerationOptions:
    return parse_chat(json.dumps({"model": "tiny", "messages": USER} | fields).encode(), limits).options


def messages(limits: RequestLimits = LIMITS, **fields: Any) -> m.GenerationOptions:
    body = {"model": "tiny", "messages": USER, "max_tokens": 9} | fields
    return parse_messages(json.dumps(body).encode(), limits).options


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"])
@pytest.mark.parametrize("value", [-1, 0, 7])
def test_vllms_and_llama_cpps_names(name: str, value: int) -> None:
    fields: dict[str, Any] = {name: value}
    assert chat(**fields).thinking_token_budget == value


def test_vllms_name_takes_precedence() -> None:
    assert chat(thinking_token_budget=3, reasoning_budget_tokens=7).thinking_token_budget == 3
    assert chat().thinking_token_budget is None
    assert chat(reasoning_budget_message="Enough.").reasoning_budget_message == "Enough."


def test_anthropics() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert messages(thinking=thinking).thinking_token_budget == 1024
    assert messages(thinking={"type": "adaptive"}).thinking_token_budget is None
    # Agents send it to every model.
    assert messages(PLAIN, thinking=thinking).thinking_token_budget is None


def test_the_others() -> None:
    ollama = {"model": "tiny", "messages": USER, "options": {"thinking_token_budget": 7}}
    assert parse_ollama(json.dumps(ollama).encode(), LIMITS).options.thinking_token_budget == 7
    body = json.dumps({"model": "tiny", "input": "Hi", "thinking_token_budget": 7, "store": False}).encode()
    assert parse_response(body, LIMITS, Stored(), "seed").request.options.thinking_token_budget == 7


@pytest.mark.parametrize("name", ["thinking_token_budget", "reasoning_budget_message"])
def test_what_has_no_reasoning_can_not_limit_it(name: str) -> None:
    fields: dict[str, Any] = {name: 7 if name == "thinking_token_budget" else "Enough."}
    with pytest.raises(ApiError, match="this model writes no reasoning that the server knows") as refused:
        chat(PLAIN, **fields)
    assert (refused.value.status, refused.value.param) == (400, name)
    for refuses in (
        lambda: parse_completion(json.dumps({"model": "tiny", "prompt": "Hi"} | fields).encode(), LIMITS),
        lambda: parse_tokens_only(json.dumps({"token_ids": [1], "sampling_params": fields}).encode(), LIMITS),
    ):
        with pytest.raises(ApiError, match="only allowed for chats") as refused:
            refuses()
        assert refused.value.status == 400 and (refused.value.param or "").endswith(name)


def test_no_limit_is_allowed_everywhere() -> None:
    assert chat(PLAIN, thinking_token_budget=-1).thinking_token_budget == -1
    body = json.dumps({"model": "tiny", "prompt": "Hi", "thinking_token_budget": -1}).encode()
    assert parse_completion(body, LIMITS).options.thinking_token_budget == -1


@pytest.mark.parametrize("text", ["a</think>b", "<think>", "a<|im_end|>"])
def test_a_message_can_not_end_the_reasoning_by_itself(text: str) -> None:
    with pytest.raises(ApiError, match="'reasoning_budget_message' must be plain text") as refused:
        chat(thinking_token_budget=1, reasoning_budget_message=text)
    assert refused.value.param == "reasoning_budget_message"


@pytest.mark.parametrize("value", [-2, 2**31, 1.5, "7", True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        chat(thinking_token_budget=value)
    assert refused.value.param == "thinking_token_budget"


def test_beam_searches_have_no_limit() -> None:
    with pytest.raises(ApiError, match="not allowed together with use_beam_search"):
        chat(thinking_token_budget=3, use_beam_search=True, n=2, temperature=0)


def test_over_zeromq() -> None:
    request = p.Request(messages=[p.MessageParam("user", "Hi")], thinking_token_budget=7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=p.Request).thinking_token_budget == 7
