"""The manager unloads a model that is idle only if the gateway knows of no request either."""

import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.config.models import ServerSettings
from pipeline.config.settings import Settings
from pipeline.runtime.messages.models import LoadModel, ModelActivity, ModelReleased
from pipeline.supervisor.models.manager import ModelManager
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.stopping import EXIT_STAGE_DIED


class Managed:
    """A manager of two models of which one fits, without a gateway; `chat` is loaded."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        shared = Settings(memory_bytes=600 * 1024**2)
        models = {name: Settings(load_at_start=False) for name in ("chat", "other")}
        server, log = ServerSettings(shared, models), logging.getLogger("pipeline")
        made = ModelManager(server, [self._listener], [], SharedKeys(None), RunMode(), log, None, cast(Any, None))
        self.manager = cast(Any, made)
        self.released: list[str] = []
        self.stopped: list[str] = []
        self.manager._gateway.release = self.released.append
        self.chat = self.manager._models["chat"]
        self.chat.state, self.chat.num_bytes = "loaded", 500 * 1024**2
        stop = lambda *_: self.stopped.append("chat")  # noqa: E731
        self.chat.thread = SimpleNamespace(is_asleep=False, stop=stop, join=lambda: None)
        self.manager._models["other"].num_bytes = 500 * 1024**2

    def close(self) -> None:
        self.chat.thread = None
        self.manager.close()
        self._listener.close()


@pytest.fixture
def managed() -> Iterator[Managed]:
    found = Managed()
    yield found
    found.close()


def test_an_idle_model_leaves_when_the_gateway_has_released_it(managed: Managed) -> None:
    manager = managed.manager
    manager._handle(LoadModel("other"))
    for _ in range(2):
        manager._load_wanted()
    assert managed.released == ["chat"] and not managed.stopped
    manager._handle(ModelReleased("chat", is_idle=True))
    assert managed.stopped == ["chat"] and managed.chat.state == "unloading"


@pytest.mark.parametrize("state", ["loading", "loaded"])
def test_a_model_that_ends_after_it_was_loaded_differs_from_one_that_never_was(managed: Managed, state: Any) -> None:
    managed.chat.state = state
    managed.manager._ended(managed.chat, EXIT_STAGE_DIED)
    found = managed.manager._status(managed.chat, is_idle=False)
    assert (found.state, found.had_loaded) == ("failed", state == "loaded")


def test_a_model_whose_request_came_meanwhile_stays(managed: Managed) -> None:
    manager = managed.manager
    manager._handle(LoadModel("other"))
    manager._load_wanted()
    manager._handle(ModelActivity("chat", is_busy=True))
    manager._handle(ModelReleased("chat", is_idle=False))
    manager._load_wanted()
    assert managed.released == ["chat"] and not managed.stopped and managed.chat.state == "loaded"


def test_a_model_without_requests_for_too_long_is_released_first(managed: Managed) -> None:
    managed.chat.keep_s = 1e-9
    managed.manager._load_wanted()
    assert managed.released == ["chat"] and not managed.stopped
    assert managed.manager._due() == [], "the loop waits for the answer"


def test_requests_that_waited_while_their_model_was_unloaded_keep_it_busy(managed: Managed) -> None:
    manager = managed.manager
    manager._handle(ModelReleased("chat", is_idle=True))
    manager._handle(ModelActivity("chat", is_busy=True))
    manager._ended(managed.chat, 0)
    assert managed.chat.state == "unloaded" and managed.chat.is_busy
