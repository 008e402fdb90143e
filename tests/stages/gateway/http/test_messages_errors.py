"""Errors below /v1/messages have the shape of Anthropic's API, whatever raises them, and its keys are accepted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.http_server.apis.anthropic import type_of
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked, raw

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def small_gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, max_body_bytes=1024) as gate:
        yield gate


@pytest.fixture
def locked_gate(tmp_path: Path) -> Iterator[Gate]:
    with locked(tmp_path) as gate:
        yield gate


def assert_error(response: Any, status: int, kind: str, words: str) -> None:
    assert response.status_code == status
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"].startswith("req_") and response.headers["request-id"] == body["request_id"]
    assert words in body["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_the_type_follows_the_status(status: int, kind: str) -> None:
    assert type_of(status) == kind


def test_errors_of_bodies(small_gate: Gate) -> None:
    post = small_gate.client.post
    bad = "invalid_request_error"
    assert_error(post(PATH, content=b"{"), 400, bad, "not valid JSON")
    assert_error(post(PATH, json={"model": MODEL, "messages": BODY["messages"]}), 400, bad, "'max_tokens' is required")
    assert_error(post(PATH, json=BODY | {"model": "claude"}), 404, "not_found_error", "'claude' does not exist")
    assert_error(post(PATH, json=BODY | {"system": "x" * 2000}), 413, "request_too_large", "1024 bytes")
    assert_error(post(f"{PATH}/count_tokens", json={"model": MODEL}), 400, bad, "'messages' is required")


def test_errors_of_routing(gate: Gate) -> None:
    client = gate.client
    assert_error(client.get(PATH), 405, "invalid_request_error", "GET is not allowed")
    assert_error(client.post(f"{PATH}/batches", json={}), 404, "not_found_error", "Not found")
    assert_error(client.post(PATH, content=b"x", headers={"Content-Type": "text/plain"}), 415, type_of(415), "json")
    assert_error(client.post(PATH, json=BODY, headers={"Host": "evil.example"}), 403, "permission_error", "Host")
    assert_error(client.post(PATH, json=BODY, headers={"Expect": "x"}), 417, type_of(417), "expectation")
    other = client.post("/v1/messages2", json={})
    assert other.json()["error"]["param"] is None, "other paths have OpenAI's shape"


def test_an_overloaded_server_says_when_to_retry(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_sequences=1) as gate:
        future = gate.post(BODY, PATH)
        submit = gate.submit()
        response = gate.client.post(PATH, json=BODY)
        gate.accept(submit)
        gate.finish(submit)
        assert future.result().status_code == 200
    assert_error(response, 503, "overloaded_error", "overloaded")
    assert int(response.headers["Retry-After"]) >= 1


def test_an_error_after_opening_has_the_request_s_id(gate: Gate) -> None:
    future = gate.post(BODY, PATH)
    gate.reject(gate.submit(), m.Failure(400, "too long", "max_tokens", "context_length_exceeded"))
    response = future.result()
    body = response.json()
    assert (response.status_code, body["error"]["message"]) == (400, "max_tokens: too long")
    assert body["request_id"].startswith("msg_") and response.headers["request-id"] == body["request_id"]


@pytest.mark.parametrize(
    ("param", "expected"),
    [("tools[1].function.parameters", "tools[1].input_schema"), ("continue_final_message", "messages")],
)
def test_an_error_of_a_stage_has_the_name_of_this_api(gate: Gate, param: str, expected: str) -> None:
    future = gate.post(BODY, PATH)
    gate.reject(gate.submit(), m.Failure(400, "no good", param, "invalid_grammar"))
    assert future.result().json()["error"]["message"] == f"{expected}: no good"


def test_every_response_has_a_request_id_of_its_own(gate: Gate) -> None:
    ids = {gate.client.post(PATH, json={}).json()["request_id"] for _ in range(3)}
    assert len(ids) == 3
    future = gate.post(BODY, f"{PATH}/count_tokens")
    gate.begin()
    assert future.result().status_code == 200 and future.result().headers["request-id"]


def test_a_client_s_own_id_is_in_its_errors(gate: Gate) -> None:
    response = gate.client.post(PATH, json={}, headers={"X-Request-Id": "mine"})
    assert response.json()["request_id"] == response.headers["request-id"] == "mine"


# ---------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("headers", [{"x-api-key": KEY}, {"X-Api-Key": SECOND}, {"Authorization": f"Bearer {KEY}"}])
def test_both_headers_carry_a_key(locked_gate: Gate, headers: dict[str, str]) -> None:
    more = {"anthropic-version": "2023-06-01", "anthropic-beta": "something-2026-01-01"}
    future = locked_gate.do(locked_gate.client.post, f"{PATH}?beta=true", json=BODY, headers=headers | more)
    locked_gate.serve("Hello")
    assert future.result().json()["content"][0]["text"] == "Hello"
    assert locked_gate.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "API key required"),
        ({"x-api-key": f"{KEY}x"}, "Invalid API key"),
        ({"x-api-key": ""}, "Invalid API key"),
        ({"x-api-key": KEY, "Authorization": "Bearer wrong"}, "Invalid API key"),
    ],
)
def test_a_wrong_key_is_refused(locked_gate: Gate, headers: dict[str, str], words: str) -> None:
    assert_error(locked_gate.client.post(PATH, json=BODY, headers=headers), 401, "authentication_error", words)


def test_two_keys_are_refused(locked_gate: Gate) -> None:
    head = f"GET /version HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\nx-api-key: {SECOND}\r\n\r\n"
    assert raw(locked_gate, head).startswith(b"HTTP/1.1 401 ")
