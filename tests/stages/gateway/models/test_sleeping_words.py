"""What a stream says while its model sleeps for others."""

from types import SimpleNamespace
from typing import Any

from pipeline.stages.gateway.apis.anthropic.events import PING
from pipeline.stages.gateway.dialect import COMMENT
from pipeline.stages.gateway.http.early_stream import WAITING, Waiting, keep_alive_of
from pipeline.stages.gateway.models.app import sleeping_words


def test_a_keep_alive_has_the_position_of_a_model_that_sleeps() -> None:
    status = SimpleNamespace(state="sleeping", position=2, waits_for=("chat", "coder"))
    model: Any = SimpleNamespace(status=status)
    seen = {"chat", "coder"}
    request: Any = {WAITING: Waiting(lambda: sleeping_words(model, seen))}
    comment = b": the model sleeps: position 2, after chat, coder\n\n"
    assert keep_alive_of(request, COMMENT) == comment
    assert keep_alive_of(request, PING) == comment + PING
    seen.remove("coder")  # the client's key does not know it
    assert keep_alive_of(request, COMMENT) == b": the model sleeps: position 2, after chat\n\n"
    status.position, status.waits_for = 0, ()
    assert keep_alive_of(request, COMMENT) == b": the model sleeps\n\n"
    status.state = "loaded"
    assert keep_alive_of(request, COMMENT) == COMMENT and keep_alive_of(request, PING) == PING
    assert keep_alive_of({}, COMMENT) == COMMENT  # type: ignore[arg-type]  # a server of one model
