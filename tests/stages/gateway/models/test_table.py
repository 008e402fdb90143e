"""The gateway's table of models: names, states, and requests that wait."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.access import guard
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.http_server.request_turns import NUM_REQUESTS
from pipeline.runtime.messages.models import (
    RETRY_S,
    FromSharedGateway,
    LoadModel,
    ModelActivity,
    ModelReleased,
    Models,
    ModelStatus,
)
from pipeline.runtime.security.api_keys import ApiKey, Keys
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.models import lists
from pipeline.stages.gateway.models import table as table_module
from pipeline.stages.gateway.models.table import IDLE_S, ModelTable

CHAT = ModelStatus(name="chat", aliases=("GPT",), adapters=("sql",))
OTHER = ModelStatus(name="other")


def table(*statuses: ModelStatus) -> tuple[ModelTable, list[FromSharedGateway]]:
    sent: list[FromSharedGateway] = []
    found = ModelTable(KeyAccounts(None), sent.append)
    found.update(Models(list(statuses)))
    return found, sent


def gateway(status: str = "ok") -> Any:
    return SimpleNamespace(readiness=SimpleNamespace(status=status), limits=SimpleNamespace(adapters={"loaded": 1}))


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_model_is_found_by_its_name_its_aliases_and_its_adapters() -> None:
    found, _ = table(CHAT, OTHER)
    assert {found.find(name).name for name in ("chat", "GPT", "sql")} == {"chat"}
    found.add("other", gateway())
    assert found.find("loaded").name == "other"
    for name in ("gpt", "chat:latest", "CHAT", ""):
        with pytest.raises(ApiError, match="models are 'chat', 'other'"):
            found.find(name)
    assert found.find("gpt:latest", as_ollama=True).name == "chat"


async def test_a_request_asks_once_for_its_model_and_waits_for_its_stage() -> None:
    found, sent = table(CHAT)
    model = found.find("chat")
    waiting = [asyncio.create_task(found.until_loaded(model)) for _ in range(2)]
    await turn()
    assert sent == [LoadModel("chat")] * 2, "the supervisor knows that it is the same"
    found.update(Models([msgspec.structs.replace(CHAT, state="loading", since_s=1.0)]))
    await turn()
    served = gateway()
    found.add("chat", served)
    assert await asyncio.gather(*waiting) == [served] * 2
    assert len(sent) == 2


async def test_a_stage_that_drains_is_waited_for_until_another_one_serves() -> None:
    found, sent = table(msgspec.structs.replace(CHAT, state="unloading"))
    leaving = gateway("draining")
    found.add("chat", leaving)
    waiting = asyncio.create_task(found.until_loaded(found.find("chat")))
    await turn()
    assert not sent
    found.remove("chat", leaving)
    found.update(Models([msgspec.structs.replace(CHAT, since_s=2.0)]))
    await turn()
    assert sent == [LoadModel("chat")]
    found.add("chat", successor := gateway())
    found.remove("chat", leaving)
    assert await waiting is successor, "the end of the one before does not remove it"


async def test_a_model_that_has_failed_is_tried_again_after_a_while_only() -> None:
    now_s = time.time()
    failed = msgspec.structs.replace(CHAT, state="failed", problem="no file", since_s=now_s)
    found, sent = table(failed)
    with pytest.raises(ApiError, match="could not be loaded: no file") as raised:
        await found.until_loaded(found.find("chat"))
    assert raised.value.status == 503 and not sent
    found.update(Models([msgspec.structs.replace(failed, had_loaded=True)]))
    with pytest.raises(ApiError, match="the model 'chat' has failed: no file"):
        await found.until_loaded(found.find("chat"))
    found.update(Models([msgspec.structs.replace(failed, since_s=now_s - RETRY_S - 1)]))
    waiting = asyncio.create_task(found.until_loaded(found.find("chat")))
    await turn()
    assert sent == [LoadModel("chat")]
    found.update(Models([msgspec.structs.replace(failed, since_s=time.time() + 1)]))
    with pytest.raises(ApiError, match="no file"):
        await waiting


def test_only_the_list_says_why_a_model_failed() -> None:
    """Anybody may read /health, and the reason may name files."""
    failed = msgspec.structs.replace(CHAT, state="failed", problem="/secret/model.gguf is missing")
    found, _ = table(failed)
    entry = found.find("chat")
    assert lists.status_of(entry, [])["problem"] == failed.problem
    health = lists.health_of(entry, None)
    assert health["state"] == "failed" and health["failed"] and "secret" not in str(health)


async def test_a_model_is_asked_for_again_if_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor does nothing if it thinks that the model has just failed: its clock is another one."""
    monkeypatch.setattr(table_module, "ASK_AGAIN_S", 0.01)
    found, sent = table(CHAT)
    waiting = asyncio.create_task(found.until_loaded(found.find("chat")))
    async with asyncio.timeout(10):
        while len(sent) < 3:
            await asyncio.sleep(0)
    found.add("chat", served := gateway())
    assert await waiting is served and set(sent) == {LoadModel("chat")}


async def test_nothing_waits_for_a_server_that_ends() -> None:
    found, _ = table(CHAT)
    waiting = asyncio.create_task(found.until_loaded(found.find("chat")))
    await turn()
    found.update(Models([CHAT], is_ending=True))
    with pytest.raises(ApiError, match="shutting down"):
        await waiting


async def test_only_the_first_and_the_last_of_several_requests_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sent = table(CHAT)
    model = found.find("chat")
    loop = asyncio.get_running_loop()
    later: list[Any] = []
    monkeypatch.setattr(loop, "call_later", lambda after_s, call, *args: later.append((after_s, call, args)))
    with found.use(model), found.use(model):
        pass
    with found.use(model):
        _, call, args = later[0]
        call(*args)
    assert sent == [ModelActivity("chat", True)], "it was not idle for a moment"
    after_s, call, args = later[-1]
    call(*args)
    assert after_s == IDLE_S and sent[1:] == [ModelActivity("chat", False)]


def keyed(settings: GatewaySettings | None = None) -> tuple[ModelTable, str, str]:
    """A table, and the scopes of a key for everything and of one for `chat`."""
    keys = Keys(b"s", [b"1", b"2"], [ApiKey("all", 0), ApiKey("chat", 1, models=("chat",))])
    found = ModelTable(KeyAccounts(keys), lambda _: None, settings)
    found.update(Models([CHAT, OTHER]))
    everything, chat = keys._scopes
    return found, everything, chat


@contextlib.contextmanager
def using(scope: str) -> Iterator[None]:
    """As in a request with the key of this scope."""
    token = guard._scope.set(scope)
    try:
        yield
    finally:
        guard._scope.reset(token)


async def test_an_adapter_takes_no_requests_of_another_model() -> None:
    """A client that loads adapters chooses their names."""
    found, _ = table(CHAT, OTHER)
    chat = gateway()
    chat.limits.adapters = {"other": 1, "OTHER": 1}
    found.add("chat", chat)
    assert found.find("other").name == "other"
    assert found.find("Other:latest", as_ollama=True).name == "other"
    assert found.find("OTHER").name == "chat"


async def test_an_adapter_that_is_loaded_has_a_name_of_its_own() -> None:
    found, _ = table(CHAT, OTHER)
    other = found.find("other")
    for name in ("chat", "GPT", "sql"):
        with pytest.raises(ApiError, match=f"the name '{name}' is taken"), found.adapter_name(other, name):
            """Not reached."""
    chat = found.find("chat")
    with found.adapter_name(other, "new"), pytest.raises(ApiError, match="taken"), found.adapter_name(chat, "new"):
        """Not reached: it is being loaded at the other one."""
    with found.adapter_name(chat, "new"), found.adapter_name(chat, "new"):
        """The model's own stage knows what is loaded twice."""


async def test_a_key_learns_nothing_of_other_models() -> None:
    found, _, scope = keyed()
    with using(scope):
        assert found.allowed_names(["chat", "other"]) == ["chat"]
        with found.adapter_name(found.find("chat"), "other"):
            """The model's own stage refuses it, as any name that the key may not use."""


async def test_requests_that_wait_for_their_models_have_a_bound() -> None:
    found, everything, chat = keyed(GatewaySettings(max_open_sequences=8, max_open_bytes=16 << 20))
    model = found.find("other", scope=everything)

    def wait(num: int, num_bytes: int, scope: str) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(found.until_loaded(model, num_bytes, scope)) for _ in range(num)]

    waiting = wait(9, 1, everything)
    await turn()
    refused = [one for one in waiting if one.done()]
    assert len(refused) == 2, "the eighth place is for another key"
    for one in refused:
        with pytest.raises(ApiError, match="8 requests of this API key"):
            await one
    other = wait(1, 1, chat)
    await turn()
    assert not other[0].done()
    for one in (*waiting, *other):
        one.cancel()
    await turn()
    waiting = wait(3, 7 << 20, everything)
    await turn()
    assert [one.done() for one in waiting] == [False, False, True]
    with pytest.raises(ApiError, match="wait for models that are not loaded") as raised:
        await waiting[2]
    assert raised.value.status == 503
    served = gateway()
    found.add("other", served)
    assert await asyncio.gather(*waiting[:2]) == [served] * 2
    waiting = wait(1, 16 << 20, everything)
    assert await waiting[0] is served, "the room is free again"


async def test_requests_go_on_in_turns_when_their_model_is_loaded() -> None:
    found, _ = table(CHAT)
    done: list[int] = []

    async def request(number: int) -> None:
        await found.until_loaded(found.find("chat"))
        done.append(number)

    requests = [asyncio.create_task(request(number)) for number in range(4 * NUM_REQUESTS)]
    await turn()
    found.add("chat", gateway())
    before = 0
    while before < len(requests):
        await asyncio.sleep(0)
        assert len(done) - before <= NUM_REQUESTS, "in one turn of the loop"
        before = len(done)


@pytest.mark.parametrize(("settings_s", "left_s"), [(0.01, math.inf), (0.0, 0.01), (5.0, 0.01)])
async def test_a_request_does_not_wait_longer_than_it_may_take(settings_s: float, left_s: float) -> None:
    found, _, scope = keyed(GatewaySettings(request_timeout_s=settings_s))
    with pytest.raises(ApiError, match=r"timed out after 0\.01 s") as raised:
        await found.until_loaded(found.find("chat", scope=scope), 0, scope, left_s)
    assert raised.value.status == 504


async def test_an_idle_model_is_released_and_its_requests_wait_until_it_is_loaded_again() -> None:
    loaded = msgspec.structs.replace(CHAT, state="loaded", since_s=1.0)
    found, sent = table(loaded)
    found.add("chat", leaving := gateway())
    model = found.find("chat")
    found.release("chat")
    assert sent == [ModelReleased("chat", is_idle=True)]
    assert (model.serves, model.state) == (False, "loaded")
    with found.use(model):
        waiting = asyncio.create_task(found.until_loaded(model))
        await turn()
        assert not waiting.done() and sent[1:] == [ModelActivity("chat", True)]
        found.update(Models([msgspec.structs.replace(CHAT, state="unloading", since_s=2.0)]))
        await turn()
        assert not waiting.done(), "the stage does not know yet that it drains"
        found.remove("chat", leaving)
        found.update(Models([msgspec.structs.replace(CHAT, since_s=3.0)]))
        await turn()
        assert sent[2:] == [LoadModel("chat")]
        found.add("chat", successor := gateway())
        assert await waiting is successor


async def test_a_model_with_an_open_request_is_not_released_whatever_the_supervisor_has_heard() -> None:
    found, sent = table(msgspec.structs.replace(CHAT, state="loaded"))
    found.add("chat", gateway())
    model = found.find("chat")
    with found.use(model):
        found.release("chat")
        assert model.serves
    assert sent == [ModelActivity("chat", True)] * 2 + [ModelReleased("chat", is_idle=False)]
