"""The gateway's table of models: names, states, and requests that wait."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.runtime.messages.models import RETRY_S, FromSharedGateway, LoadModel, ModelActivity, Models, ModelStatus
from pipeline.stages.gateway.errors import ApiError
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
    found.update(Models([msgspec.structs.replace(failed, since_s=now_s - RETRY_S - 1)]))
    waiting = asyncio.create_task(found.until_loaded(found.find("chat")))
    await turn()
    assert sent == [LoadModel("chat")]
    found.update(Models([msgspec.structs.replace(failed, since_s=time.time() + 1)]))
    with pytest.raises(ApiError, match="no file"):
        await waiting


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
