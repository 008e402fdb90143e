"""The gateway of a sleeping server dies: streams of Python clients of every kind go on at its successor, with the ids,
texts and logprobs that they would have had."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.recovery.test_recovery import assert_same, kill, pids
from tests.e2e.recovery.test_swap import counted
from tests.e2e.server import Server
from tests.e2e.zmq_streams import Once, connected

MIDDLE = 60
"""Outputs of all streams before the sleep."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("supervisor.max_restarts=1000") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with connected(server.zmq) as clients:
            return await clients.run()

    return asyncio.run(run())


def change(server: Server, *, sleeps: bool) -> None:
    """Through the admin socket, which needs no gateway."""
    (name,) = [one for one in find_servers() if one.startswith(f"{server.process.pid}-")]
    with Admin(name) as admin:
        admin.change_sleep(sleeps=sleeps, timeout_s=60.0)


@pytest.mark.parametrize("phase", ["falling asleep", "asleep", "waking"])
async def test_streams_outlive_a_gateway_that_dies_while_the_server_sleeps(
    server: Server, undisturbed: dict[str, Any], phase: str
) -> None:
    before, num_sleeps = pids(server), counted(server, "pipeline_sleeps_total")
    gateway = before["gateway.0"]
    errors: list[BaseException] = []

    def nap() -> None:
        falling = threading.Thread(target=change, args=(server,), kwargs={"sleeps": True})
        falling.start()
        if phase == "falling asleep":
            kill(gateway)
        falling.join()
        if phase == "asleep":
            assert server.health()["status"] == "sleeping"
            kill(gateway)
            server.until(lambda health: health["status"] == "sleeping")
            assert pids(server)["gateway.0"] != gateway
        waking = threading.Thread(target=change, args=(server,), kwargs={"sleeps": False})
        waking.start()
        if phase == "waking":
            server.until(lambda health: health["status"] != "sleeping")
            kill(gateway)
        waking.join()

    def careful() -> None:
        try:
            nap()
        except BaseException as error:
            errors.append(error)
            raise

    napping = threading.Thread(target=careful)
    async with connected(server.zmq) as clients:
        clients.on_output = once = Once(MIDDLE, napping.start)
        received = await clients.run()
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        assert clients.num_repeated > 0
    await asyncio.to_thread(napping.join)
    assert not errors, errors
    assert_same(received, undisturbed)
    await asyncio.to_thread(server.until_idle)
    after = pids(server)
    assert {name for name in before if before[name] != after[name]} == {"gateway.0", "execute.0"}
    assert counted(server, "pipeline_sleeps_total") == num_sleeps + 1
    server.look()
