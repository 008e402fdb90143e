"""The relay, with replicas in this process that die in the middle of streams."""

import asyncio
import errno
import json
import os
import re
import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.deploy.proxy import upstream
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed, text_of

BODY = {"prompt": "Hi", "stream": True}


async def stream(client: aiohttp.ClientSession, body: Any = BODY, path: str = "/v1/completions") -> str:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.text()


def tokens_of(text: str) -> list[int]:
    assert text.endswith("data: [DONE]\n\n") and ": point" not in text
    return [json.loads(event.removeprefix("data: "))["i"] for event in text.split("\n\n")[:-2]]


class Once:
    """Does something at a token, the first time."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at, self.is_done = what, at, False

    def __call__(self, i: int) -> str:
        if i == self.at and not self.is_done:
            self.is_done = True
            return self.what
        return ""


async def test_a_stream_is_relayed_without_points():
    replica = FakeReplica()
    async with deployed(replica) as (_, client):
        assert tokens_of(await stream(client)) == list(range(20))


@pytest.mark.parametrize("what", ["die", "tear", "without_point", "stage_died", "shutting_down"])
@pytest.mark.parametrize("at", [0, 1, 7, 19])
async def test_a_lost_stream_continues_with_each_token_once(what: str, at: int):
    once = Once(what, at)
    replicas = FakeReplica(), FakeReplica()
    for replica in replicas:
        replica.at = once
    async with deployed(*replicas) as (ingress, client):
        assert tokens_of(await stream(client)) == list(range(20))
    served = [replica.seen for replica in replicas if replica.seen]
    assert len(served) == 2, "both replicas were asked"
    counts = ingress.relay.counts
    assert (counts.num_retried, counts.num_resumed, counts.num_broken) == ((1, 0, 0) if at == 0 else (0, 1, 0))


async def test_a_stream_survives_several_deaths_with_output_in_between():
    deaths = {2, 5, 8, 11, 14}

    def at(i: int) -> str:
        if i in deaths:
            deaths.remove(i)
            return "die"
        return ""

    replicas = FakeReplica(), FakeReplica()
    for replica in replicas:
        replica.at = at
    async with deployed(*replicas) as (ingress, client):
        assert tokens_of(await stream(client)) == list(range(20))
    assert ingress.relay.counts.num_resumed == 5


def of_kind(backend: str, *, is_batch_invariant: bool = True) -> FakeReplica:
    replica = FakeReplica()
    reported = {"backend": backend, "batch_invariant": is_batch_invariant}
    replica.health = 200, {"status": "ok", "kv_blocks": {"total": 100}, **reported}
    return replica


async def test_a_lost_stream_continues_at_a_replica_that_computes_the_same(caplog: pytest.LogCaptureFixture):
    replicas = [of_kind(f"kernels={name}") for name in ("avx2", "avx512", "avx2", "avx512", "amx", "amx")]
    kinds = {replica.name: replica.health[1]["backend"] for replica in replicas}
    async with deployed(*replicas) as (ingress, client):
        for number in range(8):
            once = Once("die", 7)
            for replica in replicas:
                replica.at, replica.seen = once, []
            assert tokens_of(await stream(client, BODY | {"prompt": f"Hi {number}"})) == list(range(20))
            first, second = (replica for replica in replicas if replica.seen)
            assert first.health == second.health, f"of {kinds}"
            async with asyncio.timeout(PATIENCE_S):  # the one that died is back
                while len(ingress.relay._replicas.upstreams()) < len(replicas):
                    await asyncio.sleep(0.01)
        assert (ingress.relay.counts.num_resumed, ingress.relay.counts.num_inexact) == (8, 0)
    assert "inexactly" not in caplog.text and "replicas compute with different back ends" in caplog.text


async def test_without_such_a_replica_it_continues_and_log_health_and_metrics_say_it(
    caplog: pytest.LogCaptureFixture,
):
    replicas = of_kind("kernels=avx2"), of_kind('kernels="x\\')
    once = Once("die", 7)
    for replica in replicas:
        replica.at = once
    async with deployed(*replicas) as (ingress, client):
        assert tokens_of(await stream(client)) == list(range(20))
        assert (ingress.relay.counts.num_resumed, ingress.relay.counts.num_inexact) == (1, 1)
        async with asyncio.timeout(PATIENCE_S):
            while len(ingress.relay._replicas.upstreams()) < 2:
                await asyncio.sleep(0.01)
        health = await (await client.get("/health")).json()
        metrics = await (await client.get("/metrics")).text()
    (line,) = [record for record in caplog.records if "inexactly" in record.getMessage()]
    fields = line.__dict__["fields"]
    assert {fields["backend"], fields["before"]} == {"kernels=avx2", 'kernels="x\\'}
    assert health["same_backend"] is False
    assert {(one["backend"], one["batch_invariant"]) for one in health["replicas"]} == {
        ("kernels=avx2", True),
        ('kernels="x\\', True),
    }
    assert "pipeline_ingress_inexact_streams_total 1" in metrics
    info = [family for family in text_string_to_metric_families(metrics) if family.name == "pipeline_replica_info"]
    assert {sample.labels["backend"] for sample in info[0].samples} == {"kernels=avx2", 'kernels="x\\'}


async def test_replicas_that_are_not_batch_invariant_continue_inexactly():
    replicas = [of_kind("kernels=cuda", is_batch_invariant=False) for _ in range(2)]
    once = Once("die", 7)
    for replica in replicas:
        replica.at = once
    async with deployed(*replicas) as (ingress, client):
        assert tokens_of(await stream(client)) == list(range(20))
        assert ingress.relay.counts.num_inexact == 1
        assert (await (await client.get("/health")).json())["same_backend"] is True


@pytest.mark.parametrize("at", [0, 1])
async def test_a_stream_without_output_begins_anew_wherever_it_goes(at: int):
    replicas = of_kind("kernels=avx2"), of_kind("kernels=avx512")
    once = Once("die", at)
    for replica in replicas:
        replica.at = once
    async with deployed(*replicas) as (ingress, client):
        assert tokens_of(await stream(client)) == list(range(20))
        assert ingress.relay.counts.num_inexact == at


async def test_another_server_at_the_address_of_a_replica_is_noticed():
    replicas = of_kind("kernels=avx2"), of_kind("kernels=avx2")
    async with deployed(*replicas) as (_, client):
        assert (await (await client.get("/health")).json())["same_backend"] is True
        replicas[1].health = of_kind("kernels=torch").health
        async with asyncio.timeout(PATIENCE_S):
            while (await (await client.get("/health")).json())["same_backend"]:
                await asyncio.sleep(0.01)


async def test_a_request_that_kills_replicas_is_given_up():
    replicas = [FakeReplica() for _ in range(4)]
    for replica in replicas:
        replica.at = lambda i: "die" if i == 3 else ""
    async with deployed(*replicas) as (ingress, client):
        text = await stream(client)
        error = json.loads(text.split("\n\n")[3].removeprefix("data: "))["error"]
        assert error["code"] == "replica_died" and text.endswith("data: [DONE]\n\n")
        assert sum(len(replica.seen) for replica in replicas) == 3
        assert ingress.relay.counts.num_broken == 1


@pytest.mark.parametrize(
    ("path", "end"),
    [("/v1/completions", "data: [DONE]\n\n"), ("/v1/messages", "\n\n"), ("/v1/responses", "\n\n")],
)
async def test_a_stream_without_points_ends_with_a_clear_error(path: str, end: str):
    replicas = FakeReplica(), FakeReplica()
    once = Once("die", 5)
    for replica in replicas:
        replica.at, replica.has_points = once, False
    async with deployed(*replicas) as (ingress, client):
        text = await stream(client, path=path)
    assert "can't be continued" in text and text.endswith(end)
    assert ingress.relay.counts.num_broken == 1


async def test_a_whole_reply_is_asked_for_again():
    replicas = FakeReplica(), FakeReplica()
    once = Once("die", 0)
    for replica in replicas:
        replica.at = once
    async with deployed(*replicas) as (ingress, client), client.post("/v1/completions", json={"prompt": "x"}) as reply:
        assert (await reply.json())["text"] == text_of(20)
        assert ingress.relay.counts.num_retried == 1


async def test_a_busy_replica_s_requests_go_to_another_and_its_error_is_passed_on_if_all_are_busy():
    replicas = FakeReplica(), FakeReplica()
    busy = 503, {"error": {"message": "the server is overloaded", "code": "overloaded"}}
    replicas[0].refuses = busy
    async with deployed(*replicas) as (_, client):
        for _ in range(4):
            assert tokens_of(await stream(client)) == list(range(20))
        replicas[1].refuses = busy
        async with client.post("/v1/completions", json=BODY) as response:
            assert response.status == 503 and (await response.json()) == busy[1]


async def test_errors_of_requests_are_passed_on():
    replica = FakeReplica()
    replica.refuses = 400, {"error": {"message": "no", "param": "prompt", "code": None}}
    async with deployed(replica, FakeReplica()) as (_, client):
        replica_b_seen = 0
        for _ in range(6):
            async with client.post("/v1/completions", json={"prompt": "same"}) as response:
                replica_b_seen += response.status == 200
                assert response.status in (200, 400)
        assert len(replica.seen) == 6 - replica_b_seen


async def test_without_replicas_a_request_waits_and_then_gets_503():
    replica = FakeReplica()
    replica.health = 503, {"status": "draining"}
    async with deployed(wait_s=0.2) as (_, client), client.post("/v1/completions", json=BODY) as response:
        assert response.status == 503 and (await response.json())["error"]["code"] == "no_replica"
        async with client.get("/health") as health:
            assert health.status == 503 and (await health.json())["status"] == "unavailable"


async def test_a_dead_replica_gets_requests_again_when_it_is_back():
    replica = FakeReplica()
    async with deployed(replica) as (ingress, client):
        await replica.stop()
        waiting = asyncio.create_task(stream(client))
        while ingress.relay.counts.num_retried < 1:
            await asyncio.sleep(0.01)
        await replica.start()
        assert tokens_of(await asyncio.wait_for(waiting, PATIENCE_S)) == list(range(20))


async def test_a_client_that_leaves_ends_its_request_at_the_replica():
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    async with deployed(replica) as (ingress, client):
        async with client.post("/v1/completions", json=BODY) as response:
            await response.content.readany()
            assert ingress.relay.num_open == 1 and any(one.open_requests for one in ingress._replicas.infos())
        async with asyncio.timeout(PATIENCE_S):
            await ingress.relay.idle.wait()
            while any(one.open_requests for one in ingress._replicas.infos()):
                await asyncio.sleep(0.01)
        replica.hold.set()


async def test_a_drain_lets_streams_end_and_refuses_new_requests():
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    async with deployed(replica) as (ingress, client):
        open_stream = asyncio.create_task(stream(client))
        while not ingress.relay.num_open:
            await asyncio.sleep(0.01)
        drain = asyncio.create_task(ingress.drain())
        await asyncio.sleep(0)
        async with client.post("/v1/completions", json=BODY) as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "shutting_down"
        assert not drain.done()
        replica.hold.set()
        assert tokens_of(await open_stream) == list(range(20))
        await asyncio.wait_for(drain, PATIENCE_S)


async def test_a_replica_that_drains_keeps_its_streams_and_gets_no_new_ones():
    first, second = FakeReplica(), FakeReplica()
    first.hold = second.hold = asyncio.Event()
    async with deployed(first, second) as (ingress, client):
        open_stream = asyncio.create_task(stream(client))
        while not (first.seen or second.seen):
            await asyncio.sleep(0.01)
        busy, other = (first, second) if first.seen else (second, first)
        busy.health = 503, {"status": "draining"}
        while [one.status for one in ingress._replicas.infos() if one.name == busy.name] != ["draining"]:
            await asyncio.sleep(0.01)
        first.hold.set()
        assert tokens_of(await open_stream) == list(range(20))
        for _ in range(4):
            await stream(client)
        assert len(busy.seen) == 1 and len(other.seen) == 4


async def test_a_replica_that_recovers_keeps_its_streams_when_it_is_back():
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    async with deployed(replica) as (ingress, client):
        open_stream = asyncio.create_task(stream(client))
        while not replica.seen:
            await asyncio.sleep(0.01)
        for health, status in (((503, {"status": "recovering"}), "draining"), ((200, {"status": "ok"}), "ok")):
            replica.health = health
            while [one.status for one in ingress._replicas.infos()] != [status]:
                await asyncio.sleep(0.01)
        replica.hold.set()
        assert tokens_of(await open_stream) == list(range(20))
        assert ingress.relay.counts.num_resumed == 0 and len(replica.seen) == 1


async def test_prompts_with_a_common_prefix_go_to_one_replica():
    replicas = [FakeReplica(num_tokens=2) for _ in range(4)]
    async with deployed(*replicas) as (ingress, client):
        for i in range(12):
            await stream(client, {"prompt": "x" * 20_000 + str(i), "stream": True})
        assert sorted(len(replica.seen) for replica in replicas) == [0, 0, 0, 12]
        counts = ingress.relay._replicas.routed.router.counts
        assert counts.num_requests == 12 and counts.num_hits == 11


async def test_metrics_count_and_list_replicas():
    replica = FakeReplica()
    async with deployed(replica) as (_, client):
        await stream(client)
        async with client.get("/metrics") as response:
            text = await response.text()
    assert "pipeline_ingress_requests_total 1" in text and "pipeline_router_misses_total 1" in text
    assert f'pipeline_replica_state{{replica="{replica.name}",state="ok"}} 1' in text


async def test_aborts_go_to_all_replicas():
    replicas = FakeReplica(), FakeReplica()
    replicas[0].refuses = 200, {"num_aborted": 1, "num_unknown": 1}
    replicas[1].refuses = 200, {"num_aborted": 0, "num_unknown": 2}
    async with (
        deployed(*replicas) as (_, client),
        client.post("/abort_requests", json={"request_ids": ["a", "b"]}) as response,
    ):
        assert await response.json() == {"num_aborted": 1, "num_unknown": 1}


@pytest.mark.parametrize("more", [b"1e999", b"9" * 5000, b'"\xff"'])
async def test_ids_to_abort_are_counted_as_a_replica_reads_them(more: bytes):
    """It ignores other fields, whatever is in them."""
    replicas = FakeReplica(), FakeReplica()
    for replica in replicas:
        replica.refuses = 200, {"num_aborted": 1, "num_unknown": 1}
    body = b'{"more":%b,"request_ids":["a","b","a"]}' % more
    headers = {"Content-Type": "application/json"}
    async with (
        deployed(*replicas) as (_, client),
        client.post("/abort_requests", data=body, headers=headers) as response,
    ):
        assert await response.json() == {"num_aborted": 2, "num_unknown": 0}


@pytest.mark.parametrize("has_points", [True, False])
async def test_a_client_that_reads_slowly_is_not_the_death_of_a_replica(
    has_points: bool, monkeypatch: pytest.MonkeyPatch
):
    """The ingress stops to read, so a replica with a shorter `slow_client_timeout_s` ends the connection."""
    monkeypatch.setattr(upstream, "SLOW_S", 0.05)
    replicas = FakeReplica(num_tokens=120), FakeReplica(num_tokens=120)
    for replica in replicas:
        replica.padding, replica.slow_s, replica.has_points = 256 * 1024, 0.5, has_points
    async with deployed(*replicas) as (ingress, _):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", int(ingress.url.rsplit(":")[-1])))
        reader, writer = await asyncio.open_connection(sock=slow, limit=4096)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(PATIENCE_S):
            while not sum(replica.num_slow for replica in replicas):
                await asyncio.sleep(0.01)
        for replica in replicas:
            replica.slow_s = None
        text = await asyncio.wait_for(reader.read(-1), 2 * PATIENCE_S)
        writer.close()
        found = [int(number) for number in re.findall(rb'"i": (\d+),', text)]
        assert found == list(range(120 if has_points else len(found))) and text.count(b"replica_died") == (
            not has_points
        )
        counts = ingress.relay.counts
        assert (counts.num_resumed, counts.num_broken) == ((1, 0) if has_points else (0, 1))
        assert not any(ingress._replicas.routed.num_failures.values())
        assert [one.status for one in ingress._replicas.infos()] == ["ok", "ok"]


async def test_what_this_process_lacks_is_not_the_death_of_a_replica(monkeypatch: pytest.MonkeyPatch):
    replica = FakeReplica()
    async with deployed(replica) as (ingress, client):
        loop = asyncio.get_running_loop()
        create, num_failed = loop.create_connection, 0

        async def connect(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_failed
            if args[0] is upstream.Connection and num_failed < 10:
                num_failed += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await create(*args, **kwargs)

        monkeypatch.setattr(loop, "create_connection", connect)
        async with client.post("/v1/completions", json=BODY) as response:
            assert response.status == 503
        async with asyncio.timeout(PATIENCE_S):
            while num_failed < 10:  # probes fail in the same way
                await asyncio.sleep(0.01)
        assert [one.status for one in ingress._replicas.infos()] == ["ok"]
        assert not any(ingress._replicas.routed.num_failures.values())
        assert tokens_of(await stream(client)) == list(range(20))
