"""A body that was read to find its model is parsed from there, and not kept with the request."""

from typing import Any

from aiohttp.test_utils import make_mocked_request

from pipeline.http_server.bodies.body_reader import KEPT_BODY, BodyReader


async def test_a_kept_body_is_taken_once() -> None:
    request: Any = make_mocked_request("POST", "/v1/completions")
    request[KEPT_BODY] = b'{"model": "a"}'
    assert await BodyReader(1024, 10).parse(request, lambda body: body) == b'{"model": "a"}'
    assert KEPT_BODY not in request, "else it would take memory for as long as the reply, which nothing counts"
