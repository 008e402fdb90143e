"""Helpers for tests of an `LLM`'s embedded server."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil

from pipeline import LLM


def load_of(llm: LLM) -> dict[str, Any]:
    """The server's load, over HTTP."""
    assert llm.server is not None
    found: list[str] = []

    def look() -> bool:
        assert llm.server is not None
        found[:] = re.findall(r"ready on (http://\S+)", llm.server.log())
        return bool(found)

    until(look, "the supervisor reports the HTTP address, shortly after ZeroMQ is open")
    try:
        with urllib.request.urlopen(f"{found[0]}/health", timeout=10) as response:
            body = response.read()
    except urllib.error.HTTPError as error:  # 503: a stage is late
        body = error.read()
    health: dict[str, Any] = json.loads(body)
    return health


def family_of(pid: int, num_descendants: int) -> list[psutil.Process]:
    """A process and its descendants, once it has so many. Of a server without grammars: the fork server and stages."""
    parent = psutil.Process(pid)
    until(lambda: len(parent.children(recursive=True)) >= num_descendants, f"{num_descendants} descendants")
    family = [parent, *parent.children(recursive=True)]
    assert len(family) == 1 + num_descendants, family
    return family


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        threading.Event().wait(0.02)


def until_idle(llm: LLM) -> None:
    def is_idle() -> bool:
        health = load_of(llm)
        return health["status"] == "ok" and health["open_requests"] == health["running"] == 0

    until(is_idle, "no request is open")
