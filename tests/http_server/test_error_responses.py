"""An error response has the shape of the path's API, and keeps nothing of the request that it refuses."""

import gc
import json
import weakref
from http import HTTPStatus
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from pipeline.http_server.apis.table import FAMILIES, family_of
from pipeline.http_server.error_responses import ERROR, error_response
from pipeline.http_server.errors import ApiError


class Body:
    """A request's."""


def test_a_response_does_not_keep_the_body_that_its_error_was_raised_for() -> None:
    bodies: list[weakref.ref[Body]] = []

    def parse() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        try:
            raise ValueError("its decoder's")
        except ValueError as cause:
            raise ApiError(HTTPStatus.BAD_REQUEST, "not JSON") from cause

    def refuse() -> None:
        other = Body()
        bodies.append(weakref.ref(other))
        try:
            parse()
        except ApiError:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "no room") from None

    def blame() -> None:
        """The error has another cause than the one that was handled when it was raised."""
        try:
            parse()
        except ApiError:
            raise ApiError(HTTPStatus.BAD_REQUEST, "not valid") from ValueError("a rule")

    def gather() -> None:
        found: list[Exception] = []
        for function in (parse, blame):
            try:
                function()
            except ApiError as error:
                found.append(error)
        raise ApiError(HTTPStatus.BAD_REQUEST, "several") from ExceptionGroup("all", found)

    gc.disable()
    try:
        for function in (parse, refuse, blame, gather):
            try:
                function()
            except ApiError as error:
                response = error_response(make_mocked_request("POST", "/v1/completions"), error)
            assert isinstance(response[ERROR], ApiError)
            assert [body() for body in bodies] == [None] * len(bodies), "though it is not taken yet"
    finally:
        gc.enable()


def test_an_error_may_be_its_own_cause() -> None:
    error = ApiError(HTTPStatus.BAD_REQUEST, "raised again")
    error.__cause__ = ValueError("by something that keeps it")
    error.__cause__.__context__ = error
    assert error_response(make_mocked_request("POST", "/v1/completions"), error).status == HTTPStatus.BAD_REQUEST


REFUSALS = (401, 403, 404, 413, 429, 503)
"""Before anything of a request was parsed."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OPENAI, ANTHROPIC, OLLAMA = (
    ("/v1/chat/completions", "/v1/responses/resp_1", "/inference/v1/generate", "/nothing", "/v1/messagesx", "/apis"),
    ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nothing"),
    ("/api/chat", "/api/tags", "/api/pull", "/api/nothing"),
)


def body_of(path: str, status: int) -> tuple[Any, dict[str, str]]:
    request = make_mocked_request("POST", f"{path}?beta=true", headers={"X-Request-Id": "mine"})
    response = error_response(request, ApiError(status, "no", "model", "a_code"))
    assert response.status == status and isinstance(response.body, bytes)
    return json.loads(response.body), dict(response.headers)


@pytest.mark.parametrize("status", REFUSALS)
def test_an_error_before_parsing_has_the_shape_of_the_api(status: int) -> None:
    kind = "invalid_request_error" if status < 500 else "server_error"
    for path in OPENAI:
        body, headers = body_of(path, status)
        assert body == {"error": {"message": "no", "type": kind, "param": "model", "code": "a_code"}}, path
        assert "request-id" not in headers
    for path in ANTHROPIC:
        body, headers = body_of(path, status)
        error = {"type": TYPES[status], "message": "model: no"}
        assert body == {"type": "error", "error": error, "request_id": "mine"}, path
        assert headers["request-id"] == "mine"
    for path in OLLAMA:
        assert body_of(path, status)[0] == {"error": "model: no"}, path


def test_a_lost_stream_ends_in_the_shape_of_its_api() -> None:
    fields = {"message": "lost", "type": "server_error", "param": None, "code": "replica_died"}
    ends = {path: family_of(path).lost_stream(fields) for path in ("/v1/completions", "/v1/messages", "/api/chat")}
    assert ends["/v1/completions"] == b"data: " + json.dumps({"error": fields}).encode() + b"\n\ndata: [DONE]\n\n"
    data = json.dumps({"type": "error", "error": {"type": "api_error", "message": "lost"}}).encode()
    assert ends["/v1/messages"] == b"event: error\ndata: " + data + b"\n\n"
    assert ends["/api/chat"] == b'{"error": "lost"}\n'
    event = {"type": "error", "code": "replica_died", "message": "lost", "param": None}
    assert (
        family_of("/v1/responses").lost_stream(fields) == b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    )


def test_each_api_has_paths_of_its_own() -> None:
    assert len({family.path for family in FAMILIES}) == len(FAMILIES)
    assert [family_of(f"{family.path}/x") for family in FAMILIES] == list(FAMILIES)
