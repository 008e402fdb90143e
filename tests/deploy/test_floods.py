"""Many requests at once leave the loop to others: those for metrics, which need no key, and those that waited."""

import asyncio
import itertools
import threading
from typing import Any

import pytest

from pipeline.deploy import exposition
from pipeline.http_server.request_turns import NUM_REQUESTS
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed
from tests.deploy.proxy.streams import BODY


async def test_requests_that_wait_for_a_replica_go_on_in_turns_when_there_is_one(monkeypatch: pytest.MonkeyPatch):
    """They may be a thousand, and each takes a part of a millisecond to choose one and to be sent."""
    replica, loop = FakeReplica(num_tokens=1), asyncio.get_running_loop()
    num, done, nums = 4 * NUM_REQUESTS, list[str](), list[int]()
    async with deployed(replica) as (ingress, client):
        routed, taken = ingress._replicas.routed, list[int]()
        route = routed.route

        def counted(*args: Any) -> Any:
            lease = route(*args)
            taken.append(1)
            return lease

        def count() -> None:
            nums.append(len(taken))
            if len(done) < num:
                loop.call_soon(count)

        async def complete() -> None:
            async with client.post("/v1/completions", json=BODY) as response:
                done.append(await response.text())

        monkeypatch.setattr(routed, "route", counted)
        replica.health = 503, {"status": "recovering"}
        async with asyncio.timeout(PATIENCE_S):
            while any(one.status == "ok" for one in routed.infos()):
                await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(complete()) for _ in range(num)]
        async with asyncio.timeout(PATIENCE_S):
            while ingress.relay.num_open < min(num, 100):  # what the client's pool has
                await asyncio.sleep(0.01)
            count()
            replica.health = 200, {"status": "ok"}
            await asyncio.gather(*tasks)
        assert max(b - a for a, b in itertools.pairwise(nums)) <= NUM_REQUESTS


async def test_own_metrics_are_written_once_in_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch):
    written: list[str] = []
    own_metrics = exposition.own_metrics

    def counted(*args: Any) -> str:
        written.append(own_metrics(*args))
        return written[-1]

    monkeypatch.setattr(exposition, "own_metrics", counted)
    async with deployed(FakeReplica()) as (ingress, client):
        for num in (1, 2):
            assert {ingress._own_metrics() for _ in range(40)} == {written[-1]} and len(written) == num
            await asyncio.sleep(0)
        async with client.post("/v1/completions", json=BODY) as response:
            await response.read()
        async with client.get("/metrics") as response:
            assert "pipeline_ingress_requests_total 1\n" in await response.text()


async def test_metrics_of_many_replicas_are_written_beside_the_loop_and_once_a_second(monkeypatch: pytest.MonkeyPatch):
    """Without a key: those of 32 replicas with a thousand keys each took the loop 0.4 s, and each request 25 MB."""
    begun, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def of_replicas(_: object) -> str:
        threads.append(threading.current_thread())
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "pipeline_x 1\n"

    monkeypatch.setattr(exposition, "of_replicas", of_replicas)
    async with deployed(FakeReplica()) as (_, client):

        async def all_metrics() -> str:
            async with client.get("/metrics?replicas=1") as response:
                return await response.text()

        asked = [asyncio.create_task(all_metrics()) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            while not begun.is_set():
                await asyncio.sleep(0.01)
            async with client.get("/live") as response:
                assert response.status == 200
        go_on.set()
        texts = await asyncio.gather(*asked)
        assert all(text.endswith("pipeline_x 1\n") and "pipeline_ingress_requests_total" in text for text in texts)
        assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_the_replicas_metrics_are_fetched_once_however_often_they_are_asked_for():
    replica = FakeReplica()
    async with deployed(replica) as (_, client):

        async def fetch() -> None:
            async with client.get("/metrics?replicas=1") as response:
                assert response.status == 200

        await asyncio.gather(*(fetch() for _ in range(20)))
        assert len(replica.seen) == 1
