"""What a stream says while its model sleeps for others."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.stages.gateway.apis.anthropic.events import PING
from pipeline.stages.gateway.apis.ollama.types import OllamaChatReply, OllamaGenerateReply
from pipeline.stages.gateway.dialect import COMMENT
from pipeline.stages.gateway.http.early_stream import WAITING, Waiting, keep_alive_of
from pipeline.stages.gateway.models.app import sleeping_words


class Request(dict[Any, Any]):
    """As far as keep-alives look at it."""

    def __init__(self, path: str, model: str, words: Callable[[], str]) -> None:
        super().__init__({WAITING: Waiting(model, words)})
        self.path = path


def test_a_keep_alive_has_the_position_of_a_model_that_sleeps() -> None:
    status = SimpleNamespace(state="sleeping", position=2, waits_for=("chat", "coder"))
    model: Any = SimpleNamespace(status=status)
    seen = {"chat", "coder"}
    request: Any = Request("/v1/completions", "chat", lambda: sleeping_words(model, seen))
    comment = b": the model sleeps: position 2, after chat, coder\n\n"
    assert keep_alive_of(request, COMMENT) == comment
    assert keep_alive_of(request, PING) == comment + PING
    seen.remove("coder")  # the client's key does not know it
    assert keep_alive_of(request, COMMENT) == b": the model sleeps: position 2, after chat\n\n"
    status.position, status.waits_for = 0, ()
    assert keep_alive_of(request, COMMENT) == b": the model sleeps\n\n"
    status.state = "loaded"
    assert keep_alive_of(request, COMMENT) == COMMENT and keep_alive_of(request, PING) == PING
    one_model: Any = {}
    assert keep_alive_of(one_model, COMMENT) == COMMENT


@pytest.mark.parametrize(("route", "kind"), [("chat", OllamaChatReply), ("generate", OllamaGenerateReply)])
def test_lines_of_ollamas_api_have_the_position_in_an_object_without_text(route: str, kind: Any) -> None:
    request: Any = Request(f"/api/{route}", "Chat:latest", lambda: "the model sleeps: position 2")
    (line, rest) = keep_alive_of(request, b" ").split(b"\n")
    fields = msgspec.json.decode(line)
    assert fields.pop("status") == "the model sleeps: position 2"
    reply = msgspec.convert(fields, kind)
    assert (reply.model, reply.done, rest) == ("Chat:latest", False, b" ")
    assert msgspec.json.decode(msgspec.json.encode(reply)) == fields
    assert (reply.message.content if route == "chat" else reply.response) == ""
    assert datetime.now(UTC) - datetime.fromisoformat(reply.created_at) < timedelta(minutes=1)
