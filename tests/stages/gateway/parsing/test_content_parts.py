"""Content that a model does not read is refused in every dialect, by the path of the part and with what to send
instead."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.ollama import parsing as ollama
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_tokenize
from pipeline.stages.gateway.apis.responses.parsing import Referred, parse_response
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.zmq_requests import chat, generate, parsed

LIMITS = RequestLimits(model="tiny", max_sequences=64, max_prompt_tokens=100)
HELLO = {"role": "user", "content": "Hi"}
TEXT = {"type": "text", "text": "a"}
SEND_TEXT = '{"type": "text", "text": "…"}'
SEND_INPUT = '{"type": "input_text", "text": "…"}'


def of_responses(body: bytes, limits: RequestLimits) -> Any:
    return parse_response(body, limits, Referred(is_on=True), "seed")


def of_zmq(body: bytes, limits: RequestLimits) -> Any:
    messages = msgspec.json.decode(body, type=list[p.MessageParam])
    return parsed(generate(1, chat(messages)), limits)


def openai(*kinds: str) -> Any:
    return [HELLO, HELLO, {"role": "user", "content": [TEXT, *({"type": kind} for kind in kinds)]}]


def anthropic(kind: str) -> Any:
    return {"model": "tiny", "max_tokens": 1, "messages": [HELLO, {"role": "user", "content": [TEXT, {"type": kind}]}]}


def result(kind: str) -> Any:
    found = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, {"type": kind}]}
    return {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [TEXT, found]}]}


def responses(**part: str) -> Any:
    parts = [{"type": "input_text", "text": "a"}, part]
    return {"input": [HELLO, {"role": "user", "content": parts}]}


IMAGE = {"role": "user", "content": "a", "images": ["aGk="]}
CASES: list[tuple[Callable[[bytes, RequestLimits], Any], Any, str, str, str]] = [
    (parse_chat, {"messages": openai("image_url")}, "messages[2].content[1]", "an image", SEND_TEXT),
    (parse_chat, {"messages": openai("input_audio")}, "messages[2].content[1]", "audio", SEND_TEXT),
    (parse_chat, {"messages": openai("video_url")}, "messages[2].content[1]", "a video", SEND_TEXT),
    (parse_chat, {"messages": openai("file")}, "messages[2].content[1]", "a document", SEND_TEXT),
    (parse_tokenize, {"messages": openai("image_url")}, "messages[2].content[1]", "an image", SEND_TEXT),
    (of_zmq, openai("image_url"), "messages[2].content[1]", "an image", SEND_TEXT),
    (parse_messages, anthropic("image"), "messages[1].content[1]", "an image", SEND_TEXT),
    (parse_messages, anthropic("document"), "messages[1].content[1]", "a document", SEND_TEXT),
    (parse_count_tokens, anthropic("search_result"), "messages[1].content[1]", "a document", SEND_TEXT),
    (parse_messages, result("image"), "messages[0].content[1].content[1]", "an image", SEND_TEXT),
    (of_responses, responses(type="input_image"), "input[1].content[1]", "an image", SEND_INPUT),
    (of_responses, responses(type="input_file"), "input[1].content[1]", "a document", SEND_INPUT),
    (of_responses, responses(type="input_audio"), "input[1].content[1]", "audio", SEND_INPUT),
    (
        of_responses,
        {"input": [{"type": "reasoning", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
        "an image",
        '{"type": "reasoning_text", "text": "…"}',
    ),
    (
        ollama.parse_chat,
        {"model": "tiny", "messages": [HELLO, IMAGE]},
        "messages[1].images[0]",
        "an image",
        "the text in 'messages[1].content', and no 'images'",
    ),
    (
        ollama.parse_generate,
        {"model": "tiny", "prompt": "a", "images": ["aGk="]},
        "images[0]",
        "an image",
        "the text in 'prompt', and no 'images'",
    ),
]


@pytest.mark.parametrize(("parse", "body", "param", "kind", "instead"), CASES)
def test_a_part_that_is_not_text_is_named(
    parse: Callable[[bytes, RequestLimits], Any], body: Any, param: str, kind: str, instead: str
) -> None:
    with pytest.raises(ApiError) as error:
        parse(json.dumps(body).encode(), LIMITS)
    assert (error.value.status, error.value.param, error.value.code) == (400, param, "unsupported")
    assert error.value.message.startswith(f"'{param}' is {kind}, ")
    assert error.value.message.endswith(f": send {instead}")


@pytest.mark.parametrize(
    ("parse", "body", "param", "words"),
    [
        (
            parse_chat,
            {"messages": openai("x" * 500)},
            "messages[2].content[1].type",
            "is not text: content must be text",
        ),
        (parse_chat, {"messages": openai("refusal")}, "messages[2].content[1].type", "'refusal' is not text:"),
        (
            of_responses,
            responses(type="other"),
            "input[1].content[1].type",
            "'other' is not input_text or output_text:",
        ),
        (
            of_responses,
            responses(type="summary_text"),
            "input[1].content[1].type",
            "'summary_text' is not input_text or",
        ),
        (of_responses, responses(text="a"), "input[1].content[1].type", "is required"),
        (of_responses, responses(type="input_text"), "input[1].content[1].text", "is required"),
    ],
)
def test_a_type_that_is_no_part_is_named(
    parse: Callable[[bytes, RequestLimits], Any], body: Any, param: str, words: str
) -> None:
    with pytest.raises(ApiError) as error:
        parse(json.dumps(body).encode(), LIMITS)
    assert (error.value.status, error.value.param) == (400, param)
    assert words in error.value.message and len(error.value.message) < 400
