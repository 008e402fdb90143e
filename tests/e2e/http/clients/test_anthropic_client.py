"""Anthropic's Python client works with the real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import pytest

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
KEY = "sk-of-the-environment-4f1c0e6d"
CAPITAL: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "What is the capital of Greece?"}],
    "extra_body": {"temperature": 0},  # newer versions of the client have no argument for it
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": SCHEMA}
ASK = CAPITAL | {"max_tokens": 120, "tools": [WEATHER]}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def locked_server(tiny_model: Path) -> Iterator[Server]:
    """A server with a key and a tiny model."""
    sets = ("execute.num_threads=1", "execute.kv_cache_bytes=16MiB")
    model = (f"model={tiny_model}", f"cache_dir={tiny_model.parent / 'cache'}")
    with Server(*sets, *model, environ={"PIPELINE_API_KEYS": KEY}) as server:
        yield server


def test_a_message(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**CAPITAL, system="Answer in one sentence.", metadata={"user_id": "u"})
    assert reply.id.startswith("msg_") and (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    (block,) = reply.content
    assert block.type == "text" and "Athens" in block.text
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) > 20
    assert 1 < reply.usage.output_tokens <= 16
    assert reply._request_id == reply.id


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**CAPITAL)
    with client.messages.stream(**CAPITAL) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert reply.content[0].type == streamed.content[0].type == "text"
    assert text == streamed.content[0].text == reply.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (reply.stop_reason, reply.usage.output_tokens)
    for usage in (reply.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 37


def test_the_raw_events_have_anthropic_s_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**CAPITAL, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) - {"ping"} == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**CAPITAL, stop_sequences=["Rome", " Athens"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " Athens")
    assert reply.content[0].type == "text" and reply.content[0].text.endswith("is")
    cut = client.messages.create(**CAPITAL | {"max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_the_reply_continues_a_last_message_of_the_assistant(client: anthropic.Anthropic) -> None:
    more = [*CAPITAL["messages"], {"role": "assistant", "content": "The capital of Greece is"}]
    reply = client.messages.create(**CAPITAL | {"messages": more})
    assert reply.content[0].type == "text" and reply.content[0].text.lstrip().startswith("Athens")


@pytest.mark.parametrize("choice", [ONE_CALL, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
def test_a_tool_is_called_and_its_result_is_answered(client: anthropic.Anthropic, choice: Any) -> None:
    reply = client.messages.create(**ASK, tool_choice=choice)
    (call,) = reply.content
    assert call.type == "tool_use" and (call.name, reply.stop_reason) == ("weather", "tool_use")
    assert call.id.startswith("toolu_")
    jsonschema.validate(call.input, SCHEMA)
    with client.messages.stream(**ASK, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 degrees"}]}
    more = [*ASK["messages"], {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**CAPITAL | {"messages": more, "tools": [WEATHER], "tool_choice": {"type": "none"}})
    assert answer.content[0].type == "text"


def test_the_tool_runner_runs_a_function(client: anthropic.Anthropic) -> None:
    cities = []

    @anthropic.beta_tool
    def plan_visit(city: Literal["Athens", "Cairo"]) -> str:
        """Plan a visit."""
        cities.append(city)
        return "It is booked."

    choice: Any = {"type": "tool", "name": "plan_visit"}
    runner = client.beta.messages.tool_runner(**ASK | {"tools": [plan_visit]}, tool_choice=choice, max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert len(cities) in (1, 2) and set(cities) <= {"Athens", "Cairo"}


def test_an_output_format_is_enforced(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = client.messages.create(**CAPITAL | {"max_tokens": 80, "output_config": form})
    assert reply.content[0].type == "text"
    jsonschema.validate(json.loads(reply.content[0].text), SCHEMA)


def test_count_tokens_is_the_usage_of_the_message(client: anthropic.Anthropic) -> None:
    fields = {name: CAPITAL[name] for name in ("model", "messages")}
    each: list[dict[str, Any]] = [{}, {"system": "Answer in one sentence."}]
    for more in each:
        usage = client.messages.create(**CAPITAL | more).usage
        num_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert client.messages.count_tokens(**fields, **more).input_tokens == num_tokens


def test_the_beta_client(client: anthropic.Anthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    reply = client.beta.messages.create(**CAPITAL, betas=["context-management-2025-06-27"], context_management=edits)
    assert reply.stop_reason == "end_turn"
    assert client.beta.messages.count_tokens(**{name: CAPITAL[name] for name in ("model", "messages")}).input_tokens


def test_requests_of_claude_code(client: anthropic.Anthropic, server: Server) -> None:
    """As version 2.1.197 sends them."""
    assert httpx.head(server.url).status_code == 200
    cached = {"cache_control": {"type": "ephemeral"}}
    rules: Any = {"type": "text", "text": "You are an agent. Answer in one sentence. " * 8} | cached
    reminder = {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-23.\n</system-reminder>\n\n"}
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [
            {
                "role": "user",
                "content": [reminder, {"type": "text", "text": "What is the capital of Greece?"} | cached],
            },
            {"role": "system", "content": "The following skills are available:\n- init: Initialize a file"},
        ],
        "tools": [WEATHER],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "betas": ["claude-code-20250219", "mid-conversation-system-2026-04-07", "of-the-future-2027-01-01"],
        "extra_headers": {"x-app": "cli", "anthropic-dangerous-direct-browser-access": "true"},
    }
    nums_cached = []
    for version in ("2.1.197.73f", "2.1.197.090"):
        billing: Any = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=sdk-cli;",
        }
        with client.beta.messages.stream(**request, system=[billing, rules]) as stream:
            message = stream.get_final_message()
        assert message.usage.output_tokens > 0
        nums_cached.append(message.usage.cache_read_input_tokens or 0)
    assert nums_cached[1] > 100, "the billing header is no part of the prompt"
    with pytest.raises(anthropic.NotFoundError, match=f"'claude-opus-4-8' does not exist; this server has '{MODEL}'"):
        client.beta.messages.create(**request | {"model": "claude-opus-4-8"})


def test_errors_are_the_client_s_exceptions(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'claude' does not exist"):
        client.messages.create(**CAPITAL | {"model": "claude"})
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].* is an image"):
        client.messages.create(**CAPITAL | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens` exceed context limit: 37 \+ 100000 > 8192"):
        client.messages.create(**CAPITAL | {"max_tokens": 100_000})
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 9\d\d\d tokens > 8192 maximum"):
        client.messages.create(**CAPITAL | {"messages": [{"role": "user", "content": "word " * 9000}]})
    bad_tool: dict[str, Any] = {"name": "f", "input_schema": {"not": {}}}
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema.*not"):
            client.messages.create(**ASK | {"tools": [bad_tool], "tool_choice": choice})
    with pytest.raises(anthropic.BadRequestError, match="'max_tokens' is required") as refused:
        client.post("/v1/messages", body={"model": MODEL, "messages": CAPITAL["messages"]}, cast_to=object)
    assert json.loads(refused.value.response.content)["error"]["type"] == "invalid_request_error"
    server.until_idle()


def test_keys_in_either_header(locked_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}
    own: list[dict[str, Any]] = [
        {"api_key": KEY},
        {"auth_token": KEY},
        {"api_key": None, "default_headers": {"x-api-key": KEY, "Authorization": anthropic.omit}},
    ]
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for one in own:
        with anthropic.Anthropic(base_url=locked_server.url, max_retries=0, timeout=60, **one) as client:
            assert client.messages.create(**body).usage.output_tokens == 1
    monkeypatch.setenv("ANTHROPIC_BASE_URL", locked_server.url)
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        with monkeypatch.context() as environment:
            environment.setenv(name, KEY)
            with anthropic.Anthropic(max_retries=0) as client:
                assert client.messages.create(**body).model == "tiny"
    with (
        anthropic.Anthropic(api_key=f"{KEY}x", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="Invalid API key") as refused,
    ):
        client.messages.create(**body)
    assert refused.value.status_code == 401 and KEY not in str(refused.value)
