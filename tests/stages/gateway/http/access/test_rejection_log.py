"""A request that is refused before it is opened leaves one log line, without what the client wrote."""

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from pipeline.http_server.error_responses import error_response
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.runtime import messages as m
from pipeline.runtime.log.limited_log import MAX_LINES
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate

MORE = "rejected more requests"
SECRET = "a-secret-of-the-client"


def lines(caplog: pytest.LogCaptureFixture, text: str = "rejected") -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.getMessage() == text]
    return [record.fields for record in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", b'{"prompt": "a-secret-of-the-client', {"status": 400, "code": "invalid_json"}),
        ("/v1/completions", {"model": MODEL, "prompt": SECRET, "temperature": 3}, {"param": "temperature"}),
        ("/v1/completions", COMPLETION | {"logit_bias": {SECRET: 1}}, {"status": 400, "param": "logit_bias"}),
        ("/v1/chat/completions", CHAT | {"model": SECRET}, {"status": 404, "code": "model_not_found"}),
        ("/api/chat", CHAT | {"model": SECRET}, {"status": 404, "path": "/api/chat"}),
        (f"/nothing?key={SECRET}", {}, {"status": 404, "path": "/nothing", "method": "POST"}),
    ],
)
def test_a_refused_request_leaves_one_line(
    gate: Gate, caplog: pytest.LogCaptureFixture, path: str, body: Any, expected: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "pipeline")
    response = gate.post(body, path).result()
    (line,) = lines(caplog)
    assert line | expected == line and line["status"] == response.status_code
    assert SECRET not in str(line)


def test_a_line_has_the_id_that_the_client_knows(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipeline")
    response = gate.client.post("/v1/messages", json={})
    gate.client.post("/v1/completions", json={}, headers={"X-Request-Id": "mine"})
    assert [line["response_id"] for line in lines(caplog)] == [response.json()["request_id"], "mine"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_request_that_a_stage_refuses_has_no_second_line(
    gate: Gate, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO", "pipeline")
    future = gate.post({"model": MODEL, "prompt": "Hi"} if "compl" in path else {"model": MODEL, "input": "Hi"}, path)
    gate.reject(gate.submit(), m.Failure(400, "too long", "max_tokens"))
    assert future.result().status_code == 400
    (line,) = lines(caplog)
    assert "request" in line


def test_the_lines_of_a_second_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 50.0
    log = RejectionLog(logging.getLogger("tests.rejections"), lambda: now_s)
    request = make_mocked_request("GET", "/nothing")

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        return error_response(request, ApiError(404, "Not found"))

    caplog.set_level("INFO", "tests.rejections")
    for _ in range(MAX_LINES + 5):
        asyncio.run(log.wrap(refuse)(request))  # type: ignore[arg-type]
    log.flush()
    assert (len(lines(caplog)), lines(caplog, MORE)) == (MAX_LINES, [])
    now_s += 1.0
    log.flush()  # a heartbeat
    log.flush()
    assert lines(caplog, MORE) == [{"num": 5}]
    asyncio.run(log.wrap(refuse)(request))  # type: ignore[arg-type]
    assert len(lines(caplog)) == MAX_LINES + 1
