"""docs/http.md and docs/http/: the server answers the examples as written, and each route and field is documented."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config.settings import Settings
from pipeline.http_server.access.guard import PAGE_PREFIX
from pipeline.stages.gateway.apis.tokens.parsing import PARAMS_UNSUPPORTED_FIELDS, GenerateSamplingParams
from pipeline.stages.gateway.http.routes import ROUTES
from tests.e2e.server import Server
from tests.stages.gateway.gate import idle_api

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "docs" / "http.md", *sorted((ROOT / "docs" / "http").glob("*.md"))]
TEXT = "\n".join(document.read_text("utf-8") for document in DOCUMENTS)
EXAMPLE = re.compile(r"```sh\n(curl .+?)\n```\n\n```(json|text)\n(.+?)\n```", re.DOTALL)
EXAMPLES = EXAMPLE.findall(TEXT)


def request_of(command: str, url: str) -> httpx.Request:
    """The request that curl sends for a command of the document."""
    words = iter(shlex.split(command)[1:])
    target, headers, data, method = "", {}, None, ""
    for word in words:
        match word:
            case "-H":
                name, _, value = next(words).partition(": ")
                headers[name] = value
            case "-d":
                data = next(words)
                headers.setdefault("Content-Type", "application/x-www-form-urlencoded")  # curl's default
            case "-N":
                pass
            case "-X":
                method = next(words)
            case _:
                assert word.startswith("http://127.0.0.1:8000/"), word
                target = url + word.removeprefix("http://127.0.0.1:8000")
    return httpx.Request(method or ("GET" if data is None else "POST"), target, headers=headers, content=data)


def shape(value: Any) -> Any:
    """The structure of a value: keys in order, and the types of their values."""
    match value:
        case dict():
            return {key: shape(item) for key, item in value.items()}
        case list():
            return [shape(value[0])] if value else []
        case bool() | None:
            return value
        case int() | float():
            return "number"
    return "text"


def without_last_text(event: Any) -> Any:
    """An event of a stream without its delta, if it ends a choice: on a busy machine the last text may come with it."""
    for choice in event.get("choices", []):
        if choice.get("finish_reason") and "delta" in choice:
            choice["delta"] = {}
    return event


FIXED = ("object", "model", "owned_by", "role", "param", "code", "type", "message", "tokens", "token_strs", "prompt")
FIXED_TOO = ("num_aborted", "num_unknown", "server_load", "max_model_len", "status")


def fixed(value: Any) -> Iterator[Any]:
    """The values of an example that are the same on every machine. Generated text is not: instruction sets round
    differently, and a model of 135M parameters is often undecided."""
    match value:
        case dict():
            for key, item in value.items():
                if key in (*FIXED, *FIXED_TOO) and not isinstance(item, dict):
                    yield key, item
                yield from fixed(item)
        case list():
            for item in value:
                yield from fixed(item)


def test_there_are_examples_of_every_kind() -> None:
    commands = re.findall(r"^curl .+", TEXT, re.MULTILINE)
    assert len(EXAMPLES) == len([one for one in commands if "Authorization" not in one]) >= 10


@pytest.mark.parametrize(("command", "kind", "expected"), EXAMPLES, ids=[c.split("8000")[1][:28] for c, *_ in EXAMPLES])
def test_the_server_answers_each_example_as_documented(server: Server, command: str, kind: str, expected: str) -> None:
    with httpx.Client(timeout=60) as client:
        response = client.send(request_of(command, server.url))
    if kind == "text" and expected.startswith("{"):
        lines = [[line for line in text.split("\n") if line.startswith("{")] for text in (expected, response.text)]
        documented, sent = ({json.dumps(shape(json.loads(line))) for line in each} for each in lines)
        assert documented == sent
        return
    if kind == "text":
        last = expected.split("\n")[-1]
        assert last in ("data: [DONE]", 'data: {"type":"message_stop"}') and response.text.endswith(f"{last}\n\n")
        names = [set(re.findall(r"^event: .*", text, re.MULTILINE)) for text in (expected, response.text)]
        assert names[0] == names[1]
        shapes = [
            [
                shape(without_last_text(json.loads(line.removeprefix("data: "))))
                for line in text.split("\n")
                if line.startswith("data: {")
            ]
            for text in (expected, response.text)
        ]
        assert [one for one in shapes[1] if one not in shapes[0]] == []
        assert [one for one in shapes[0] if one not in shapes[1]] == []
        return
    example, answer = json.loads(expected), response.json()
    if isinstance(example, dict):
        assert list(example) == list(answer)
    assert shape(answer) == shape(example)
    assert list(fixed(answer)) == list(fixed(example))
    if isinstance(example, dict) and "prompt_tokens" in example.get("usage", {}):
        assert answer["usage"]["prompt_tokens"] == example["usage"]["prompt_tokens"]
        for usage in (answer["usage"], example["usage"]):
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage.get("completion_tokens", 0)
    has_error = isinstance(example, dict) and example.get("error") is not None
    assert (response.status_code >= 400) == has_error


def test_every_field_is_documented_or_rejected_by_name() -> None:
    bodies = [*(route.body for route in ROUTES if route.body is not None), GenerateSamplingParams]
    names = {name for body in bodies for name in body.__struct_fields__}
    for name in names.union(PARAMS_UNSUPPORTED_FIELDS, *(route.unsupported_fields for route in ROUTES)):
        assert f"`{name}`" in TEXT, f"docs/http/ does not describe {name}"


def test_every_route_is_documented() -> None:
    settings = Settings()
    app = idle_api(settings.gateway).app()
    for route in app.router.routes():
        if route.method != "HEAD":
            path = route.resource.canonical if route.resource is not None else ""
            if path.startswith(PAGE_PREFIX):
                continue  # parts of the web page
            heading = f"## {route.method} {path}".removesuffix("/{model}")
            assert heading in TEXT, f"docs/http/ does not describe {heading}"


def test_every_error_code_is_documented() -> None:
    root = ROOT / "stages"
    sources = [path for stage in ("gateway", "ingest", "schedule") for path in (root / stage).rglob("*.py")]
    sources = [path for path in sources if path.parent.name != "zmq"]  # those are in docs/protocol.md
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source.read_text("utf-8"))}
    assert codes
    page = DOCUMENTS[0].read_text("utf-8")
    for code in codes - {"aborted"}:  # its client never receives it
        assert f"`{code}`" in page, f"docs/http.md does not describe the code {code}"
