"""A model of several fails or is unloaded: its requests hear that, not that the server ends, and those that are being
read wait until it is loaded again."""

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.http_server.access.key_accounts import Account, KeyAccounts
from pipeline.http_server.bodies.body_reader import KEPT_BODY
from pipeline.runtime.messages.models import Models
from pipeline.runtime.security import key_usage
from pipeline.runtime.security.api_keys import ApiKey
from pipeline.runtime.security.key_usage import UsageMemory
from pipeline.stages.gateway.http.request_reader import RequestReader
from pipeline.stages.gateway.models.app import ModelsApp
from pipeline.stages.gateway.models.table import ModelTable
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import NotReady, Readiness
from pipeline.stages.gateway.stage import GatewayStage
from tests.stages.gateway.models.test_table import CHAT

PARSED = SimpleNamespace(images=[])
BODY = b'{"model": "chat", "prompt": "Hello"}'


class Request(dict[Any, Any]):
    """As far as it is looked at before it is parsed."""

    content_length = len(BODY)
    transport = None

    @property
    def headers(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ("stage execute.0 died: SIGKILL", "the model 'chat' has failed: stage execute.0 died: SIGKILL"),
        (None, "the model 'chat' is being unloaded: send the request again, which loads it"),
    ],
)
def test_a_model_that_ends_alone_does_not_say_that_the_server_ends(failure: str | None, expected: str) -> None:
    ends = False
    found = Readiness("chat", lambda: ends)
    found.failure, found.is_draining = failure, True
    with pytest.raises(NotReady) as raised:
        found.require_ready()
    assert (raised.value.message, raised.value.code) == (expected, "failed" if failure else "draining")
    ends = True
    with pytest.raises(NotReady, match="the server is shutting down"):
        found.require_ready()


@pytest.fixture
def account() -> Iterator[Account]:
    """Of a key with one request a minute."""
    fd = key_usage.create()
    memory = UsageMemory(fd, 0)
    yield Account(ApiKey("alice", 0, rpm=1), memory)
    memory.close()
    os.close(fd)


@pytest.mark.parametrize("is_limited", [False, True])
async def test_a_request_whose_model_is_unloaded_while_its_body_is_parsed_waits_for_it_and_counts_once(
    is_limited: bool, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts, sent = KeyAccounts(None), list[Any]()
    if is_limited:
        monkeypatch.setattr(accounts, "of_scope", lambda _: account)
    table = ModelTable(accounts, sent.append)
    table.update(Models([msgspec.structs.replace(CHAT, state="loaded")], is_ready=True))
    app = ModelsApp(table, Settings(), accounts)
    arrived: list[Any] = []

    def add() -> Any:
        """A stage that is unloaded while it parses its first body, unless it is the second stage."""
        readiness, requests = Readiness("chat", lambda: False), SimpleNamespace(check_room=lambda _, **__: None)
        requests.accounts = accounts
        readiness.facts = msgspec.UNSET  # type: ignore[assignment] # any but None
        limits: Any = SimpleNamespace(
            caps=Settings().limits, allowed=(), for_key=lambda _: limits, why_no_images="none"
        )
        reader = RequestReader(readiness, requests, limits, GatewaySettings())  # type: ignore[arg-type]

        async def parse(http_request: Any, head: Any, parser: Any, limits: RequestLimits) -> Any:
            body = http_request.pop(KEPT_BODY)
            readiness.is_draining = not arrived
            arrived.append(body)
            return PARSED, msgspec.structs.replace(head, body=body)

        reader._parse_request = parse  # type: ignore[method-assign]

        async def handle(http_request: Any) -> Any:
            return await reader.read(http_request, "completions")

        stage: Any = SimpleNamespace(readiness=readiness, limits=SimpleNamespace(adapters={}), handler=lambda _: handle)
        table.add("chat", stage)
        return stage

    first, route, request = add(), SimpleNamespace(handler="completions"), Request({KEPT_BODY: BODY})
    answer = asyncio.create_task(app._serve(route, request, table.find("chat")))  # type: ignore[arg-type]
    while not arrived and not answer.done():
        await asyncio.sleep(0)
    assert not (await asyncio.wait([answer], timeout=0.01))[0], "it waits"
    table.remove("chat", first)
    add()
    found: Any = await answer
    assert arrived == [BODY, BODY] and found[0] is PARSED and found[1].body == BODY


async def test_a_stage_that_ends_without_a_drain_opens_no_request_whose_body_is_still_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor stops it at once, for example because another stage of the model failed at the start."""
    monkeypatch.setattr("pipeline.stages.gateway.stage.AsyncInbox", Mock())
    readiness = Readiness("chat", lambda: False)
    readiness.facts = msgspec.UNSET  # type: ignore[assignment] # any but None
    at_the_end: list[str] = []
    stage: Any = Mock(readiness=readiness, _loop=AsyncMock(), _listeners=AsyncMock(have_http=False))
    stage._stage.launch.facts, stage._stage.replay_context.is_replaying = None, False
    stage.requests.close_all = lambda _: at_the_end.append(readiness.status)
    stage.api.responses.wait_closed = AsyncMock()
    await GatewayStage.serve(stage)
    assert at_the_end == ["draining"]
    with pytest.raises(NotReady):
        readiness.require_ready()
