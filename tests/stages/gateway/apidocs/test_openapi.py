"""The OpenAPI document is valid, covers every route and matches the types; its page is self-contained."""

import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Raw

from pipeline.config.settings import LimitSettings as Caps
from pipeline.stages.gateway.apidocs import openapi, page
from pipeline.stages.gateway.apidocs.description import address_of
from pipeline.stages.gateway.apidocs.schemas import Schemas
from pipeline.stages.gateway.apis.openai import reply as responses
from pipeline.stages.gateway.http.routes import ROUTES
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.http.access.test_guard import RIGHT, locked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jsonschema
    import openapi_spec_validator

CAPS = Caps(
    max_n=7,
    max_logprobs=3,
    max_stop_strings=4,
    max_stop_token_ids=5,
    max_bad_words=6,
    max_logit_bias=8,
    max_tools=9,
)
API = openapi.document("tiny", CAPS, has_keys=True)
WITHOUT_KEY = ("health", "live", "ping", "metrics")
"""Handlers of the routes that need no key."""


def test_the_document_is_valid_openapi_3_1() -> None:
    openapi_spec_validator.validate(API)
    openapi_spec_validator.validate(openapi.document("tiny", Caps(), has_keys=False, has_admin_routes=False))
    for schema in API["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_route_has_its_body_reply_and_errors() -> None:
    for route in ROUTES:
        operation = API["paths"][route.path][route.method.lower()]
        assert ("requestBody" in operation) == (route.body is not None)
        assert {"400", "500", "503"} <= set(operation["responses"])
        needs_key = route.handler not in WITHOUT_KEY
        assert ("401" in operation["responses"]) == needs_key
        assert operation.get("security") == (None if needs_key else [])
        streams = {"text/event-stream", "application/x-ndjson"} & set(operation["responses"]["200"].get("content", {}))
        own = "application/x-ndjson" if route.path.startswith("/api/") else "text/event-stream"
        assert streams == ({own} if route.event is not None else set())
    assert API["security"] == [{"apiKey": []}]
    assert "/health" not in openapi.document("tiny", Caps(), has_keys=True, has_admin_routes=False)["paths"]
    assert "security" not in openapi.document("tiny", Caps(), has_keys=False)


def test_the_document_has_this_servers_model_and_limits() -> None:
    chat = API["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["model"]["enum"] == ["tiny", None]
    assert '"maximum": 7' in json.dumps(chat["n"])


def bounds_of(struct: str, field: str) -> dict[str, Any]:
    """A field's own keys and those of its alternatives, except null."""
    one = API["components"]["schemas"][struct]["properties"][field]
    found = dict(one)
    for part in one.get("anyOf", ()):
        found |= {} if part == {"type": "null"} else part
    return found


@pytest.mark.parametrize(
    ("struct", "field", "key", "bound"),
    [
        ("ChatBody", "top_logprobs", "maximum", 3),
        ("ChatBody", "prompt_logprobs", "maximum", 3),
        ("CompletionBody", "logprobs", "maximum", 3),
        ("SamplingParams", "logprobs", "maximum", 3),
        ("ChatBody", "stop", "maxItems", 4),
        ("ChatBody", "stop_token_ids", "maxItems", 5),
        ("CompletionBody", "bad_words", "maxItems", 6),
        ("ChatBody", "logit_bias", "maxProperties", 8),
        ("ChatBody", "tools", "maxItems", 9),
        ("TokenizeBody", "tools", "maxItems", 9),
        ("MessagesBody", "stop_sequences", "maxItems", 4),
        ("MessagesBody", "tools", "maxItems", 9),
    ],
)
def test_limits_of_the_settings_are_in_the_schema(struct: str, field: str, key: str, bound: int) -> None:
    assert bounds_of(struct, field)[key] == bound


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], {"type": "function"}),
        ("tools", None, [1]),
        ("tool_choice", "required", "any"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, {"type": "function"}),
        ("documents", [{"a": 1}], {"a": 1}),
        ("chat_template_kwargs", {"a": 1}, [1]),
        ("guided_json", {"type": "object"}, 1),
        ("guided_json", "{}", True),
        ("structured_outputs", {"json": {}}, {"json": 1}),
        ("response_format", {"type": "text"}, {"type": "xml"}),
        ("messages", [{"role": "user", "content": "a"}], [{"role": "a bot", "content": "a"}]),
    ],
)
def test_fields_that_the_decoder_does_not_check_have_a_type(field: str, good: Any, bad: Any) -> None:
    schema = full({"$ref": "#/components/schemas/ChatBody"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    jsonschema.validate(body | {field: good}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {field: bad}, schema)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("tools", [{"name": "f", "input_schema": {}}], [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", {"type": "any"}, {"type": "required"}),
        ("tool_choice", {"type": "tool", "name": "f"}, {"type": "tool"}),
        ("thinking", {"type": "enabled", "budget_tokens": 9}, {"type": "enabled"}),
        (
            "messages",
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            [{"role": "user", "content": [1]}],
        ),
    ],
)
def test_objects_with_a_type_are_described_by_it(field: str, good: Any, bad: Any) -> None:
    schema = full({"$ref": "#/components/schemas/MessagesBody"})
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    jsonschema.validate(body | {field: good}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {field: bad}, schema)


def test_routes_have_the_errors_of_their_api() -> None:
    for path, kind in (
        ("/v1/messages", "MessagesErrorBody"),
        ("/v1/completions", "ErrorBody"),
        ("/api/chat", "OllamaErrorBody"),
    ):
        reference = API["paths"][path]["post"]["responses"]["503"]["$ref"].rpartition("/")[2]
        error = API["components"]["responses"][reference]
        assert error["content"]["application/json"]["schema"]["$ref"].endswith(f"/{kind}")
        assert "Retry-After" in error["headers"]
        words = API["paths"][path]["post"]["responses"]["200"]["description"]
        assert f"{'the last line is' if kind == 'OllamaErrorBody' else 'an event has'} a {kind}" in words


def test_the_document_has_the_server_url_and_the_finish_reasons() -> None:
    assert [server["url"] for server in API["servers"]] == ["/"]
    reasons = {*responses.FINISH_REASONS.values(), "tool_calls"}
    assert set(bounds_of("ChatChoice", "finish_reason")["enum"]) == reasons


def full(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"components": API["components"]}


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body is not None], ids=lambda route: route.path)
def test_examples_are_valid(route: Any) -> None:
    content = API["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
    jsonschema.validate(content["example"], full(content["schema"]))
    msgspec.json.decode(msgspec.json.encode(content["example"]), type=route.body)
    for name in content["example"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(content["example"] | {name: [[0.5]]}, full(content["schema"]))


class Part(msgspec.Struct):
    """A part."""

    text: str
    parts: list["Part"] = []


class Documented(msgspec.Struct):
    """The first paragraph
    of it.

    Not this."""

    number: Annotated[int, Meta(ge=1, lt=9, description="From Meta.")] | None
    part: Part
    """From below."""
    raw: Raw = Raw()
    choice: Literal["a", "b"] = "a"
    both: str | list[float] = ""
    names: dict[str, int] = {}


def test_the_schema_of_a_type() -> None:
    schemas = Schemas()
    assert schemas.of(Documented) == {"$ref": "#/components/schemas/Documented"}
    whole = schemas.components["Documented"]
    assert whole["description"] == "The first paragraph of it."
    assert whole["required"] == ["number", "part"]
    fields = whole["properties"]
    assert fields["number"]["anyOf"][0] == {
        "type": "integer",
        "minimum": 1,
        "exclusiveMaximum": 9,
        "description": "From Meta.",
    }
    assert fields["part"] == {"$ref": "#/components/schemas/Part", "description": "From below."}
    assert fields["raw"] == {}
    assert fields["choice"] == {"enum": ["a", "b"]}
    assert fields["both"]["type"] == ["string", "array"]
    assert fields["names"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert schemas.components["Part"]["properties"]["parts"]["items"] == {"$ref": "#/components/schemas/Part"}


class Seen(HTMLParser):
    """Tags, ids and links of a page; open tags must be closed in order."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_the_page_is_complete_and_self_contained() -> None:
    html = page.page(API, "http://127.0.0.1:8000")
    seen = Seen(html)
    assert not {"script", "link", "img", "iframe", "form"} & set(seen.tags)
    assert len(set(seen.ids)) == len(seen.ids)
    assert {link for link in seen.links if link.startswith("#")} <= {f"#{one}" for one in seen.ids}
    assert [link for link in seen.links if not link.startswith("#")] == ["openapi.json"]
    for route in ROUTES:
        assert route.path in html
    assert html.count("<pre>curl ") == len(ROUTES)
    assert html.count("$PIPELINE_API_KEY") == len(ROUTES) - len(WITHOUT_KEY)


def test_each_route_and_type_has_a_link_to_it() -> None:
    seen = Seen(page.page(API, "http://127.0.0.1:8000"))
    expected = {route.handler for route in ROUTES} | {f"type-{name}" for name in API["components"]["schemas"]}
    assert set(seen.ids) == expected
    assert {f"#{one}" for one in expected} <= set(seen.links)


@pytest.mark.parametrize("host", ["localhost:8123", "llm.example.com", "10.0.0.7:80", "[::1]:8000", "a_b:1"])
def test_examples_use_the_host_of_the_request(tmp_path: Path, host: str) -> None:
    with Gate(tmp_path, allowed_hosts=("*",)) as gate:
        html = gate.client.get("/docs", headers={"Host": host}).text
    assert html.count(f"http://{host}/") == len(ROUTES)
    assert "127.0.0.1:8000" not in html and "%" not in re.findall(r"<pre>curl .*", html)[0]


@pytest.mark.parametrize(
    "host", ["", "a b", "a;reboot", "$(reboot)", "<b>", 'x"y', "a/b", "a@b", "x" * 300, "a:123456", "-o"]
)
def test_an_invalid_host_is_not_repeated(tmp_path: Path, host: str) -> None:
    with locked(tmp_path) as gate:  # without keys such a host is rejected
        response = gate.client.get("/docs", headers={"Host": host} | RIGHT)
        own = str(gate.client.base_url).rstrip("/")
    assert response.text.count(f"{own}/") == len(ROUTES)


def test_an_ipv6_address_is_in_brackets() -> None:
    assert address_of(None, ("::1", 8000, 0, 0)) == "http://[::1]:8000"


def test_descriptions_are_escaped_in_html() -> None:
    html = page.page(openapi.document("<script>alert(1)</script>", Caps(), has_keys=False), "http://x")
    assert "<script" not in html and "&lt;script" in html


def test_a_server_serves_document_and_page_and_caches_them(gate: Gate) -> None:
    described = gate.client.get("/openapi.json")
    assert described.headers["Content-Type"].startswith("application/json")
    assert described.json()["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"] == ["tiny", None]
    shown = gate.client.get("/docs")
    assert shown.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = shown.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    style = re.findall(r"<style>(.*?)</style>", shown.text, re.DOTALL)
    assert style == [page.STYLE]
    assert gate.client.get("/openapi.json").content == described.content
