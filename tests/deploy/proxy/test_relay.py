"""The relay, with replicas in this process: errors, drains, aborts, metrics, and what is no death of a replica."""

import asyncio
import errno
import json
import os
import re
import socket
from typing import Any

import pytest

from pipeline.deploy.proxy import upstream
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed, text_of
from tests.deploy.proxy.streams import BODY, Once, stream, tokens_of


async def test_a_stream_is_relayed_without_points():
    replica = FakeReplica()
    async with deployed(replica) as (_, client):
        assert tokens_of(await stream(client)) == list(range(20))


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
            assert health.status == 503 and health.headers["Retry-After"]
            assert (await health.json())["status"] == "unavailable"


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


@pytest.mark.parametrize("path", ["/v1/chat/completions/control", "/v1/chat/completions/chatcmpl-1/control"])
async def test_controls_go_to_all_replicas(path: str):
    replicas = FakeReplica(), FakeReplica()
    no = {"success": False, "message": "there is none"}
    for first, second, answer in ((no, {"success": True}, {"success": True}), (no, no, no)):
        replicas[0].refuses, replicas[1].refuses = (200, first), (200, second)
        async with (
            deployed(*replicas) as (_, client),
            client.post(path, json={"action": "reasoning_end", "id": "chatcmpl-1"}) as response,
        ):
            assert await response.json() == answer


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
