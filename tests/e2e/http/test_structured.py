"""Structured output through the whole server: the output matches the constraint, however it is requested."""

import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        "rivers": {"type": "array", "items": {"enum": ["Seine", "Loire", "Rhône"]}, "maxItems": 2},
    },
    "required": ["city", "people", "rivers"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}

ENOUGH = 1200
"""In tokens. Strict JSON may have 65 characters of white space in each of some 14 places: no text of these schemas is
longer, whatever the model samples."""


def post_chat(server: Server, **how: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of Paris."}], "max_tokens": ENOUGH}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | how, timeout=60)


def contents(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices), choices
    return [choice["message"]["content"] for choice in choices]


def test_a_schema_with_n_returns_n_matching_objects(server: Server) -> None:
    texts = contents(post_chat(server, response_format=FORMAT, n=3, seed=1))
    assert len(set(texts)) > 1
    for text in texts:
        Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_a_stream_returns_the_same_as_a_whole_reply(server: Server) -> None:
    (whole,) = contents(post_chat(server, response_format=FORMAT, seed=4))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of Paris."}], "max_tokens": ENOUGH}
    body |= {"response_format": FORMAT, "seed": 4, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"])
    assert text == whole


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ({"guided_regex": "[A-Z][a-z]{2,5} [0-9]{4}"}, "[A-Z][a-z]{2,5} [0-9]{4}"),
        ({"structured_outputs": {"choice": ["Seine \N{WATER WAVE}", "Loire"]}}, "Seine \N{WATER WAVE}|Loire"),
        ({"guided_grammar": 'root ::= "ja" | "nein" ("!" | "?")'}, r"ja|nein[!?]"),
        ({"structured_outputs": {"grammar": 'start: "a"~3 B\nB: /[xy]/'}}, "aaa[xy]"),
    ],
)
def test_every_kind_of_constraint_is_followed(server: Server, how: dict[str, Any], pattern: str) -> None:
    (text,) = contents(post_chat(server, **how))
    assert re.fullmatch(pattern, text), text


def test_json_mode_returns_any_object(server: Server) -> None:
    response = post_chat(server, response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    choice = response.json()["choices"][0]
    # Nothing makes a small model finish. A finished output is an object.
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_stop_strings_and_length_end_it_early(server: Server) -> None:
    stopped = post_chat(server, guided_regex="[a-c]{5}!{50}", stop="!!").json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and re.fullmatch("[a-c]{5}", stopped["message"]["content"])
    cut = post_chat(server, guided_regex="(ab){50}", max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length" and ("ab" * 50).startswith(cut["message"]["content"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_match_the_tool_s_schema(server: Server, choice: Any) -> None:
    response = post_chat(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    Draft202012Validator(WEATHER["function"]["parameters"]).validate(json.loads(call["function"]["arguments"]))


def test_completions_follow_constraints(server: Server) -> None:
    body = {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 20, "guided_choice": ["red", "green"]}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert {choice["text"] for choice in response.json()["choices"]} <= {"red", "green"}


@pytest.mark.parametrize(
    ("how", "param", "part"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            None,
            '"not"',
        ),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_json": {"type": "integer", "multipleOf": 99999989}}, "guided_json", ""),
        ({"guided_regex": "(" * 5000}, "guided_regex", "unclosed"),
    ],
)
def test_invalid_constraints_are_errors_that_name_the_parameter(
    server: Server, how: Any, param: str | None, part: str
) -> None:
    response = post_chat(server, **how)
    error = response.json()["error"]
    assert response.status_code == 400 or (response.status_code == 503 and not part), error
    assert part in error["message"] and error["param"] and (param is None or error["param"] == param), error
    assert contents(post_chat(server, guided_choice=["alive"])) == ["alive"]
