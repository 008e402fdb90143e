"""Replies of Ollama's API, read by Ollama's Python client: text, thinking, tool calls, figures and errors."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import END, MODEL, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, locked

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("find", "now")]
FIND = '<tool_call>\n{"name": "find", "arguments": {"text": "a"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FIGURES = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        yield gate


@pytest.fixture
def client(gate: Gate) -> Iterator[ollama.Client]:
    with ollama.Client(host=gate.url, timeout=20) as client:
        yield client


def answer(gate: Gate, *pieces: str, finish: m.Finish = m.Finish.STOP) -> None:
    """Play the stages for the next request."""
    submit = gate.submit()
    gate.accept(submit, tail="assistant:")
    for piece in pieces:
        gate.delta(submit, piece)
    gate.delta(submit, "", num_ids=0, finish=finish)


def ask(gate: Gate, client: ollama.Client, *pieces: str, finish: m.Finish = m.Finish.STOP, **fields: Any) -> Any:
    """The response of /api/chat, or of /api/generate if there is a prompt: whole, and joined from a stream."""

    def call(**more: Any) -> "Future[Any]":
        if "prompt" in fields:
            return gate.do(client.generate, MODEL, **fields, **more)
        return gate.do(client.chat, MODEL, HELLO, **fields, **more)

    future = call()
    answer(gate, *pieces, finish=finish)
    whole = future.result()
    stream = call(stream=True).result()
    future = gate.do(list, stream)
    answer(gate, *pieces, finish=finish)
    *parts, last = future.result()
    assert not any(part.done for part in parts) and all(
        getattr(part, name) is None for part in parts for name in FIGURES
    )
    for part in (whole, last):
        assert (part.model, part.done, part.prompt_eval_count, part.eval_count) == (MODEL, True, 3, len(pieces))
        assert part.total_duration >= part.eval_duration > 0 and part.load_duration == 0
    assert whole.done_reason == last.done_reason
    messages = [part if "prompt" in fields else part.message for part in (*parts, last)]
    name = "response" if "prompt" in fields else "content"
    expected = whole if "prompt" in fields else whole.message
    assert "".join(getattr(one, name) for one in messages) == getattr(expected, name)
    assert "".join(one.thinking or "" for one in messages) == (expected.thinking or "")
    if "prompt" not in fields:
        assert [call for one in messages for call in one.tool_calls or []] == (expected.tool_calls or [])
    return whole


def test_a_chat(gate: Gate, client: ollama.Client) -> None:
    reply = ask(gate, client, "Hel", "lo", "!")
    assert (reply.message.role, reply.message.content, reply.done_reason) == ("assistant", "Hello!", "stop")
    assert reply.message.tool_calls is None and reply.message.thinking is None
    assert reply.created_at.endswith("Z")


@pytest.mark.parametrize(("finish", "reason"), [(m.Finish.LENGTH, "length"), (m.Finish.ABORT, "abort")])
def test_reasons(gate: Gate, client: ollama.Client, finish: m.Finish, reason: str) -> None:
    assert ask(gate, client, "Hel", finish=finish).done_reason == reason


@pytest.mark.parametrize("stream", [False, True])
def test_durations_are_those_of_the_prompt_and_of_the_output(gate: Gate, stream: bool) -> None:
    future = gate.post({"model": MODEL, "messages": HELLO, "stream": stream}, "/api/chat")
    submit, now_s = gate.submit(), time.monotonic()
    gate.accept(submit, tail="assistant:")
    gate.delta(submit, "a", first=m.FirstTimes(0, now_s, now_s + 100, now_s + 110, 0))
    gate.delta(submit, "b", finish=m.Finish.STOP, settled_s=now_s + 130)
    last = json.loads(future.result().text.splitlines()[-1])
    assert last["prompt_eval_duration"] == pytest.approx(10e9), "from the first step to the first token"
    assert last["eval_duration"] == pytest.approx(20e9), "from the first token to the end"
    assert last["total_duration"] > 130e9, "since the request arrived"


def test_thinking_is_separate_from_the_content(gate: Gate, client: ollama.Client) -> None:
    pieces = ("<think>", "Hm. ", "So.", "</think>", "Yes", "!")
    reply = ask(gate, client, *pieces, think=True)
    assert (reply.message.thinking.strip(), reply.message.content) == ("Hm. So.", "Yes!")
    reply = ask(gate, client, *pieces, prompt="Hi", think="low")
    assert (reply.thinking.strip(), reply.response) == ("Hm. So.", "Yes!")
    assert ask(gate, client, *pieces, think=False).message.thinking is None


def test_tool_calls_are_complete(gate: Gate, client: ollama.Client) -> None:
    reply = ask(gate, client, "Let me ", "see.", FIND[:20], FIND[20:], NOW, tools=TOOLS)
    first, second = reply.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("find", {"text": "a"})
    assert (second.function.name, second.function.arguments) == ("now", {})
    assert reply.message.content.strip() == "Let me see." and reply.done_reason == "stop"


def test_calls_have_ids_and_indexes(gate: Gate) -> None:
    future = gate.post({"model": MODEL, "messages": HELLO, "tools": TOOLS, "stream": False}, "/api/chat")
    answer(gate, FIND, NOW)
    calls = future.result().json()["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


def test_a_call_that_the_reply_ends_within_is_left_out(gate: Gate, client: ollama.Client) -> None:
    reply = ask(gate, client, FIND, NOW[:30], tools=TOOLS, finish=m.Finish.LENGTH)
    assert [call.function.name for call in reply.message.tool_calls] == ["find"]
    assert reply.done_reason == "length"


def test_generate_and_raw(gate: Gate, client: ollama.Client) -> None:
    assert ask(gate, client, "Hel", "lo", prompt="Hi").response == "Hello"
    assert ask(gate, client, "<think>", "x", prompt="Hi", raw=True).response == "<think>x"


def test_logprobs_of_each_token(gate: Gate, client: ollama.Client) -> None:
    def logprobs(stream: bool) -> list[Any]:
        fields: dict[str, Any] = {"prompt": "Hi", "raw": True, "logprobs": True}
        calls = gate.do(lambda: list(client.generate(MODEL, **fields, stream=True))) if stream else None
        future = calls or gate.do(client.generate, MODEL, **fields)
        submit = gate.begin()
        for text, value in (("a", -1.0), ("b", -2.0)):
            gate.delta(submit, text, logprobs=[value], pieces=[text.encode()])
        gate.delta(submit, "", logprobs=[-3.0], pieces=[b"</s>"], finish=m.Finish.STOP)
        parts = future.result() if stream else [future.result()]
        return [(one.token, one.logprob) for part in parts for one in part.logprobs or []]

    assert logprobs(stream=False) == logprobs(stream=True) == [("a", -1.0), ("b", -2.0), ("</s>", -3.0)]


def test_embeddings(gate: Gate, client: ollama.Client) -> None:
    for call, names in ((client.embed, {"input": "x"}), (client.embeddings, {"prompt": "x"})):
        future = gate.do(call, MODEL, **names)
        gate.delta(gate.begin(), "", token_outputs=np.array([3, 4] + [0] * 6, "<f4").tobytes(), finish=m.Finish.LENGTH)
        reply = future.result()
        vector = reply.embeddings[0] if "embeddings" in reply else reply.embedding
        assert vector == pytest.approx([0.6, 0.8] + [0] * 6)
    assert client.embed(MODEL, []).embeddings == []
    assert client.embeddings(MODEL, "").embedding == []


def test_a_request_without_a_prompt_is_answered_at_once(gate: Gate, client: ollama.Client) -> None:
    for reply in (client.generate(MODEL), client.chat(MODEL), *client.chat(MODEL, stream=True)):
        assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "load")


# -------------------------------------------------------------------------------------------------------------- errors


def test_errors_name_the_field(gate: Gate, client: ollama.Client) -> None:
    for status, words, fields in (
        (404, "model 'x' not found", {"model": "x"}),
        (400, "'options.temperature' must be a number >= 0 and <= 2", {"options": {"temperature": 3}}),
        (400, "'messages[0].images[0]' is an image", {"messages": [HELLO[0] | {"images": [b"x"]}]}),
    ):
        for stream in (False, True):
            call: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": stream}
            with pytest.raises(ollama.ResponseError) as error:
                list(client.chat(**call | fields))
            assert (error.value.status_code, words in error.value.error) == (status, True), error.value
    future = gate.do(client.chat, MODEL, HELLO, options={"num_predict": 9})
    gate.reject(gate.submit(), m.Failure(400, "too long", "max_tokens", "context_length_exceeded"))
    with pytest.raises(ollama.ResponseError, match=r"options\.num_predict: too long"):
        future.result()


def test_all_errors_below_api_have_one_field(gate: Gate) -> None:
    http = gate.client
    for response in (
        http.get("/api/chat"),
        http.post("/api/pull", json={"model": "x"}),
        http.post("/api/chat", content=b"{"),
        http.post("/api/chat", content=b"x", headers={"Content-Type": "text/plain"}),
        http.post("/api/show", json={}),
    ):
        assert response.status_code >= 400 and list(response.json()) == ["error"]
        assert isinstance(response.json()["error"], str)
    assert http.get("/apis").json()["error"]["param"] is None, "other paths have OpenAI's shape"


def test_a_stream_that_fails_ends_with_an_error(gate: Gate) -> None:
    with gate.raw({"model": MODEL, "messages": HELLO}, "/api/chat") as connection:
        submit = gate.submit()
        gate.accept(submit, tail="assistant:")
        gate.delta(submit, "Hel")
        read_until(connection, b'"content":"Hel"')
        gate.delta(submit, "", num_ids=0, finish=m.Finish.ERROR, error="NaN logits")
        rest = read_until(connection, END)
    assert b'{"error":"the server could not finish this request: NaN logits"}\n' in rest
    assert b'"done":true' not in rest


def test_a_client_that_disconnects_aborts_its_request(gate: Gate) -> None:
    connection = gate.raw({"model": MODEL, "messages": HELLO}, "/api/chat")
    submit = gate.begin()
    gate.delta(submit, "Hel")
    head = read_until(connection, b"\n\r\n")
    assert b"Content-Type: application/x-ndjson" in head and json.loads(head.split(b"\r\n")[-2])["done"] is False
    connection.close()
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id


def test_a_key_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_API_KEY", raising=False)
    with locked(tmp_path) as gate:
        with (
            ollama.Client(host=gate.url) as client,
            pytest.raises(ollama.ResponseError, match="API key required") as no,
        ):
            client.ps()
        assert no.value.status_code == 401
        monkeypatch.setenv("OLLAMA_API_KEY", KEY)
        with ollama.Client(host=gate.url) as client:
            assert client.generate(MODEL).done_reason == "load"
