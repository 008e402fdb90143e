"""A replica that answers nonsense harms only its own requests."""

import asyncio

import pytest

from tests.deploy.fake_replica import FakeReplica, deployed
from tests.rig import PATIENCE_S

DEEP = b'{"status": "ok", "error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ANSWERS = (
    DEEP,
    b"\xff\xfe",
    b"",
    b"null",
    b'{"num_aborted": "many", "num_blocks": null}',
    b"# \n# HELP\n# TYPE x\n{} 1\nx{ 1\n\x00",
)


async def until_replicas_are_ok(ingress: object, num: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(one.status == "ok" for one in ingress._replicas.infos()) != num:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: str(len(one)))
async def test_its_health_is_asked_for_again(answer: bytes):
    odd = FakeReplica()
    async with deployed(odd, FakeReplica()) as (ingress, _):
        sane, odd.health = odd.health, (503, {"status": "draining"})
        await until_replicas_are_ok(ingress, 1)
        odd.health, num = (200, answer), odd.num_probes
        async with asyncio.timeout(PATIENCE_S):
            while odd.num_probes < num + 2:
                await asyncio.sleep(0.01)
        odd.health = (503, {"status": "draining"})
        await until_replicas_are_ok(ingress, 1)
        odd.health = sane
        await until_replicas_are_ok(ingress, 2)


@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: str(len(one)))
async def test_its_answers_are_no_fault_of_the_ingress(answer: bytes, status: int):
    odd = FakeReplica()
    odd.refuses = status, answer
    async with deployed(odd) as (_, client):
        async with client.post("/v1/completions", json={"prompt": "a"}) as response:
            assert (response.status, await response.read()) == (status, answer)
        async with client.get("/metrics?replicas=1") as response:
            assert response.status == 200 and "pipeline_ingress_requests_total" in await response.text()
        async with client.post("/abort_requests", json={"request_ids": ["a"]}) as response:
            assert response.status == status
            if status == 200:
                assert (await response.json()).get("num_aborted", 0) in (0, 1)
