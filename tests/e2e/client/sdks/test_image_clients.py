"""Images from the clients of OpenAI, Anthropic, Ollama and langchain-openai: the answers are those of plain HTTP
requests. A tiny SmolVLM on a CPU."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.e2e.client.packages import python_with, run
from tests.e2e.client.sdks.test_other_clients import CLIENTS, RUN_S, environ
from tests.e2e.models.test_images import CHATS, chat, make_folder, png, rules, url
from tests.e2e.recovery.test_recovery import post
from tests.e2e.server import Server

MODEL = "source"
NUM_TOKENS = 12
ONE, TWO = png(41), png(42, (30, 90))
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    _, source = make_folder(tmp_path_factory.mktemp("images"))
    with Server(*rules(source)) as server:
        yield server


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(data: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def text(words: str) -> Any:
    return {"type": "text", "text": words}


ASKED: list[Any] = [{"role": "user", "content": [part(ONE), part(TWO), text("Do they differ?")]}]
USED: list[Any] = [
    {"role": "user", "content": [text("Look")]},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [text("seen"), part(ONE)]},
    {"role": "user", "content": [part(TWO), text("Is it this?")]},
]
"""With an image in the result of a tool."""
CONVERSATIONS = {"message": ASKED, "result of a tool": USED}


def plain(server: Server, messages: list[Any]) -> tuple[str, int]:
    """The text of the reply to a plain request, and the number of tokens of its prompt."""
    body = {**chat("x", ignore_eos=False, max_tokens=NUM_TOKENS), "messages": messages}
    found = post(server, CHATS, **body)
    num_tokens = found["usage"]["prompt_tokens"]
    assert num_tokens > 50, "two images"
    return found["choices"][0]["message"]["content"], num_tokens


@pytest.fixture(scope="module", params=CONVERSATIONS)
def conversation(request: pytest.FixtureRequest, server: Server) -> tuple[str, tuple[str, int]]:
    """The name of a conversation, and what a plain request for it gets."""
    return request.param, plain(server, CONVERSATIONS[request.param])


Conversation = tuple[str, tuple[str, int]]


def test_openai_chats_have_images(server: Server, conversation: Conversation) -> None:
    name, expected = conversation
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": CONVERSATIONS[name],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
        }
        found = client.chat.completions.create(**fields)
        assert found.usage is not None
        assert (found.choices[0].message.content, found.usage.prompt_tokens) == expected
        chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected[0]


RESPONSES: dict[str, list[Any]] = {
    "message": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": url(ONE), "detail": "auto"},
                {"type": "input_image", "image_url": url(TWO), "detail": "auto"},
                {"type": "input_text", "text": "Do they differ?"},
            ],
        }
    ],
    "result of a tool": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [
                {"type": "input_text", "text": "seen"},
                {"type": "input_image", "image_url": url(ONE), "detail": "auto"},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": url(TWO)}, {"type": "input_text", "text": "Is it this?"}],
        },
    ],
}


def test_openai_responses_have_images(server: Server, conversation: Conversation) -> None:
    name, (words, num_tokens) = conversation
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        given = RESPONSES[name]
        found = client.responses.create(model=MODEL, input=given, temperature=0, max_output_tokens=NUM_TOKENS)
        assert found.usage is not None and (found.output_text, found.usage.input_tokens) == (words, num_tokens)
        items = list(client.responses.input_items.list(found.id, order="asc"))
        assert [one.type for one in items] == [one.get("type", "message") for one in given]
        if name != "message":
            assert items[3].to_dict()["output"] == given[3]["output"], "it is stored as it came"
        # The stored conversation has its images, and so has one whose end comes later
        for cut in range(1, len(given)):
            if given[cut - 1].get("type") != "function_call":
                continue
            first = client.responses.create(model=MODEL, input=given[:cut], temperature=0, max_output_tokens=1)
            rest = client.responses.create(
                model=MODEL,
                previous_response_id=first.id,
                input=given[cut:],
                temperature=0,
                max_output_tokens=NUM_TOKENS,
            )
            assert rest.usage is not None and rest.usage.input_tokens >= num_tokens
        more = client.responses.create(
            model=MODEL, previous_response_id=found.id, input="And?", temperature=0, max_output_tokens=2
        )
        assert more.usage is not None and more.usage.input_tokens > num_tokens


def block(data: bytes) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


MESSAGES: dict[str, list[Any]] = {
    "message": [{"role": "user", "content": [block(ONE), block(TWO), text("Do they differ?")]}],
    "result of a tool": [
        {"role": "user", "content": [text("Look")]},
        {
            "role": "assistant",
            "content": [text("I look."), {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("seen"), block(ONE)]},
                block(TWO),
                text("Is it this?"),
            ],
        },
    ],
}


def test_anthropic_messages_have_images(server: Server, conversation: Conversation) -> None:
    name, (words, num_tokens) = conversation
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": MESSAGES[name],
            "max_tokens": NUM_TOKENS,
            "extra_body": {"temperature": 0},
        }
        found = client.messages.create(**fields)
        assert "".join(one.text for one in found.content if one.type == "text") == words
        assert found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) == num_tokens
        with client.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == words
        assert client.messages.count_tokens(model=MODEL, messages=MESSAGES[name]).input_tokens == num_tokens
        with pytest.raises(anthropic.BadRequestError, match=r"content\[0\].source.type"):
            bad = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
            client.messages.create(**fields | {"messages": [{"role": "user", "content": [bad]}]})


def test_ollama_messages_have_images(server: Server, tmp_path: Path) -> None:
    options = {"temperature": 0, "num_predict": NUM_TOKENS, "top_k": 0, "top_p": 1}
    expected = plain(server, ASKED)
    file = tmp_path / "two.png"
    file.write_bytes(TWO)
    with ollama.Client(host=server.url, timeout=60) as client:
        for images in ([ONE, TWO], [encoded(ONE), str(file)]):  # the client reads files and encodes bytes
            said = ollama.Message(
                role="user", content="Do they differ?", images=[ollama.Image(value=i) for i in images]
            )
            found = client.chat(MODEL, [said], options=options)
            assert (found.message.content, found.prompt_eval_count) == expected
            parts = list(client.chat(MODEL, [said], options=options, stream=True))
            assert "".join(one.message.content or "" for one in parts) == expected[0]
            one = client.generate(MODEL, "Do they differ?", images=images, options=options)
            assert (one.response, one.prompt_eval_count) == expected
        assert "vision" in (client.show(MODEL).capabilities or [])
        result = ollama.Message(role="tool", content="seen", tool_name="look", images=[ollama.Image(value=ONE)])
        call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="look", arguments={}))
        used = [
            ollama.Message(role="user", content="Look"),
            ollama.Message(role="assistant", content="I look.", tool_calls=[call]),
            result,
        ]
        reply = client.chat(MODEL, used, options=options)
    first = {"role": "tool", "tool_call_id": "call_1", "content": [part(ONE), text("seen")]}  # images are first
    assert (reply.message.content, reply.prompt_eval_count) == plain(server, [*USED[:2], first])


def test_langchain_messages_have_images(server: Server, tmp_path: Path) -> None:
    python, (words, num_tokens) = python_with(CLIENTS / "requirements.txt"), plain(server, USED)
    given = tmp_path / "given.json"
    given.write_text(
        json.dumps({"images": [encoded(ONE), encoded(TWO)], "text": words, "num_tokens": num_tokens}), encoding="utf-8"
    )
    own = ["-c", "pytest.ini", "--rootdir", str(CLIENTS), "--confcutdir", str(CLIENTS)]
    run(
        [str(python), "-m", "pytest", *own, "with_langchain_images.py"],
        CLIENTS,
        RUN_S,
        environ(server, tmp_path) | {"PIPELINE_MODEL": MODEL, "PIPELINE_GIVEN": str(given)},
    )
    server.until_idle()
