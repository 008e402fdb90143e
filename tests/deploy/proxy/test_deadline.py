"""The time of a request, which its attempts at several replicas share."""

import asyncio
import json
import time
from typing import Any

import pytest

from pipeline.deploy.proxy.deadline import TIMED_PATHS
from pipeline.deploy.proxy.upstream import Upstream
from pipeline.deploy.replicas import NoReplica
from pipeline.http_server import time_left
from pipeline.stages.gateway.apis.openai.invocations import InvocationBody
from pipeline.stages.gateway.http.routes import ROUTES
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed
from tests.deploy.proxy.streams import BODY, Once, stream, tokens_of

SOON = {"timeout_s": 0.2}
LONG = 10 * PATIENCE_S


def error_of(status: int, text: str) -> tuple[int, str, str]:
    error = json.loads(text)["error"]
    return status, error["code"], error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("body", "setting", "headers", "shown"),
    [
        (SOON, 0.0, {}, 0.2),
        ({}, 0.2, {}, 0.2),
        (SOON, LONG, {}, 0.2),
        ({"timeout_s": LONG}, 0.0, {time_left.HEADER: "0.2"}, LONG),
        ({}, 0.0, {time_left.HEADER: "0.2"}, 0.2),
    ],
)
async def test_the_wait_for_a_replica_ends_with_it(
    body: Any, setting: float, headers: dict[str, str], shown: float, is_stream: bool
):
    replica = FakeReplica()
    replica.health = 503, {"status": "draining"}
    body = {"prompt": "a", "stream": is_stream} | body
    gateway = {"request_timeout_s": setting}
    async with (
        deployed(wait_s=LONG, gateway=gateway) as (ingress, client),
        client.post("/v1/completions", json=body, headers=headers) as response,
    ):
        message = f"the request timed out after {shown:g} s, before its first token"
        assert error_of(response.status, await response.text()) == (504, "timeout", message)
        assert ingress.relay.counts.num_unserved == 1


@pytest.mark.parametrize("where", ["lease", "connect"])
async def test_so_does_what_a_replica_makes_it_wait_for(where: str, monkeypatch: pytest.MonkeyPatch):
    replica = FakeReplica()
    async with deployed(replica) as (ingress, client):
        num_ended = 0

        async def endless(*_: Any, **__: Any) -> None:
            nonlocal num_ended
            try:
                await asyncio.Event().wait()
            finally:
                num_ended += 1

        if where == "lease":
            monkeypatch.setattr(ingress.relay._replicas, "lease", endless)
        else:
            monkeypatch.setattr(Upstream, "connect", endless)
        async with client.post("/v1/completions", json=BODY | SOON) as response:
            assert error_of(response.status, await response.text())[:2] == (504, "timeout")
        assert num_ended and not ingress.relay.num_open
        monkeypatch.undo()
        assert not any(one.open_requests for one in ingress._replicas.infos())
        assert not any(ingress._replicas.routed.num_failures.values()), "it is not dead for that"


async def test_each_attempt_has_what_is_left_of_it():
    replicas = [FakeReplica() for _ in range(3)]

    def die(i: int) -> str:
        time.sleep(0.1)
        return "die"

    for replica in replicas:
        replica.at = die
    async with deployed(*replicas) as (_, client):
        async with client.post("/v1/completions", json={"prompt": "a", "timeout_s": 9}) as response:
            assert response.status == 503
        seen = [float(headers[time_left.HEADER.lower()]) for one in replicas for _, headers, _ in one.seen]
    first, second, third = sorted(seen, reverse=True)
    assert 9 >= first >= second + 0.09 and second >= third + 0.09  # milliseconds are rounded


async def test_a_stream_that_is_continued_has_what_is_left_of_it_and_ends_with_it():
    replica, once = FakeReplica(), Once("die", 7)
    replica.at = once
    async with deployed(replica, resume_timeout_s=LONG) as (ingress, client):
        assert tokens_of(await stream(client, BODY | {"timeout_s": PATIENCE_S})) == list(range(20))
        first, second = [float(headers[time_left.HEADER.lower()]) for _, headers, _ in replica.seen]
        assert PATIENCE_S >= first > second
        once.is_done = False

        replicas: Any = ingress._replicas
        lost = replicas.lost

        async def none(*_: Any) -> None:
            raise NoReplica

        def stay_lost(name: str) -> None:
            lost(name)
            replicas.lease = none

        replicas.lost = stay_lost
        text = await stream(client, BODY | {"timeout_s": 0.5})
        error = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert error["code"] == "timeout" and "after 0.5 s, while it waited for a replica" in error["message"]
        assert text.endswith("data: [DONE]\n\n")


async def test_a_request_without_a_limit_has_no_header_and_a_client_s_own_is_replaced():
    replica = FakeReplica()
    async with deployed(replica) as (_, client):
        for headers, most in (({}, None), ({time_left.HEADER: "5"}, 5.0)):
            async with client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 200
            found = [value for name, value in replica.seen[-1][1].items() if name == time_left.HEADER.lower()]
            assert [float(one) <= 5 for one in found] == ([] if most is None else [True])
        async with client.post("/v1/completions", json={"prompt": "a"}, headers={time_left.HEADER: "x"}) as response:
            assert response.status == 400
        assert len(replica.seen) == 2


def test_the_routes_that_take_a_time_are_those_of_the_gateway():
    timed = {
        route.path
        for route in ROUTES
        if route.body is InvocationBody or "timeout_s" in getattr(route.body, "__struct_fields__", ())
    }
    assert timed == TIMED_PATHS


async def test_a_route_that_ignores_the_time_of_a_body_has_that_of_the_settings():
    replica = FakeReplica()
    async with deployed(replica, gateway={"request_timeout_s": 5.0}) as (_, client):
        for path, most in (("/v1/messages", 5), ("/v1/completions", 100)):
            async with client.post(path, json={"prompt": "a", "timeout_s": 100}) as response:
                assert response.status == 200
            left_s = float(replica.seen[-1][1][time_left.HEADER.lower()])
            assert most - 3 < left_s <= most
