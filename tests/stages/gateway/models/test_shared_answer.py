"""Answers to many at once are made once."""

import asyncio

import pytest

from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.metrics import exposition
from pipeline.stages.gateway.models.server import ModelsApi
from pipeline.stages.gateway.models.shared_answer import SharedAnswer
from pipeline.stages.gateway.models.table import ModelTable


async def test_requests_that_come_meanwhile_share_the_next_answer() -> None:
    made: list[int] = []
    go_on = asyncio.Event()

    async def make() -> int:
        made.append(len(made))
        number = made[-1]
        await go_on.wait()
        return number

    answer = SharedAnswer(make)
    first = asyncio.create_task(answer.get())
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(answer.get()) for _ in range(100)]
    await asyncio.sleep(0.01)
    assert made == [0], "one at a time"
    later[0].cancel()  # its client has left
    go_on.set()
    assert await first == 0
    assert await asyncio.gather(*later[1:]) == [1] * 99, "it began after the question"
    assert await answer.get() == 2


async def test_an_answer_that_fails_does_so_for_all_that_share_it() -> None:
    async def fails() -> int:
        raise OSError("no")

    answer = SharedAnswer(fails)
    found = await asyncio.gather(*(answer.get() for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in found] == ["no"] * 3


@pytest.mark.parametrize("route", ["metrics", "health"])
async def test_a_crowd_without_keys_has_metrics_and_health_made_once_or_twice(
    monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    made: list[int] = []
    own_text = exposition.text_of_models
    monkeypatch.setattr(exposition, "text_of_models", lambda *args: made.append(1) or own_text(*args))
    table = ModelTable(KeyAccounts(None), lambda _: None)
    own_all = table.all
    if route == "health":
        monkeypatch.setattr(table, "all", lambda: made.append(1) or own_all())
    api = ModelsApi(table, None)  # type: ignore[arg-type]
    replies = await asyncio.gather(*(getattr(api, route)(None) for _ in range(200)))
    assert len({one.body for one in replies}) == 1 and 1 <= len(made) <= 2
