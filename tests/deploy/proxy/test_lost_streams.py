"""Replicas that die or leave in the middle of streams, which continue elsewhere, or end with a clear error."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed
from tests.deploy.proxy.streams import BODY, Once, stream, tokens_of


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
