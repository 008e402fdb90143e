"""What tests ask a server of several models."""

import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.server import Server

ANSWER_S = 240.0
"""On a busy machine, models that take turns do little else."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def ask(server: Server, path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    """The answer to a GET, or to a POST with a body. Raises HTTPError, which shows what was answered."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{server.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        answer = error.read()
        again = urllib.error.HTTPError(error.url, error.code, error.reason, error.headers, io.BytesIO(answer))
        again.add_note(answer.decode())
        raise again from None


def error_of(server: Server, path: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(server, path, body, key)
    return raised.value.code, json.loads(raised.value.fp.read())


def completion(server: Server, model: str, num: int = 8, **fields: Any) -> Any:
    return ask(server, "/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": num} | GREEDY | fields)


def statuses(server: Server) -> dict[str, dict[str, Any]]:
    return {one["id"]: one["status"] for one in ask(server, "/v1/models")["data"]}


def states(server: Server) -> dict[str, str]:
    return {name: status["value"] for name, status in statuses(server).items()}


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)
    return found


def events_of(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a stream that are not empty."""
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return [line for line in response.read().decode().splitlines() if line]
