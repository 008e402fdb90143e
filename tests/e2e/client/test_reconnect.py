"""A gateway dies, or the whole server is started again, while Python clients have requests of every kind open: each
receives exactly what it would have received."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import LLM, SamplingParams
from tests.e2e.conftest import tiny
from tests.e2e.server import Server
from tests.e2e.zmq_streams import PATIENCE_S, Clients, Once, connected
from tests.guardian import guard
from tests.stages.gateway.http.access.test_guard import free_port

KEY = "key-of-this-server"


def pid_of(server: Server, name: str) -> int:
    (found,) = [one["pid"] for one in server.health()["stages"] if one["name"] == name]
    return int(found)


async def test_requests_outlive_their_gateway_before_they_have_output(deployment: "Deployment") -> None:
    async with deployment.clients() as clients:
        expected = await deployment.expected(clients)
        pid = await asyncio.to_thread(pid_of, deployment.server, "gateway.0")
        once = Once(1, lambda: os.kill(pid, signal.SIGKILL))
        clients.on_output = once
        assert_same(await clients.run(), expected)
        assert once.is_done and clients.client.is_connected
    assert await asyncio.to_thread(pid_of, deployment.server, "gateway.0") != pid
    await deployment.until_idle()


@pytest.mark.parametrize("killed", [0, 1])
async def test_streams_outlive_their_gateway_and_those_of_another_do_not_notice(
    deployment: "Deployment", killed: int
) -> None:
    """`LLM` and `AsyncLLM` have requests at both gateways."""
    async with deployment.clients(killed) as clients, deployment.clients(1 - killed) as others:
        expected = await deployment.expected(clients)
        pid = await asyncio.to_thread(pid_of, deployment.server, f"gateway.{killed}")
        once = Once(150, lambda: os.kill(pid, signal.SIGKILL))
        clients.on_output = once
        received = await asyncio.gather(clients.run(), others.run())
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        for one in received:
            assert_same(one, expected)
        assert clients.num_repeated > 0 == others.num_repeated
    await deployment.until_idle()


async def test_streams_outlive_their_server(deployment: "Deployment") -> None:
    """It ends them, and is started again at its address."""
    async with deployment.clients() as clients:
        expected = await deployment.expected(clients)
        restarted: list[asyncio.Task[None]] = []
        once = Once(60, lambda: restarted.append(asyncio.create_task(asyncio.to_thread(deployment.restart))))
        clients.on_output = once
        received = await clients.run()
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        await restarted[0]
        assert clients.num_repeated > 0
    assert_same(received, expected)


def test_streams_of_the_javascript_client_outlive_their_gateway_and_their_server(
    deployment: "Deployment", node_client: Path
) -> None:
    def run(at_moment: Callable[[], object]) -> dict[str, Any]:
        command = ["node", "resume.mjs", deployment.address(), KEY]
        with subprocess.Popen(command, cwd=node_client, stdout=subprocess.PIPE, text=True) as process:
            guard(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "moment\n"
            at_moment()
            stdout, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        result: dict[str, Any] = json.loads(stdout)
        return result

    expected = run(lambda: None)
    assert expected["numRepeats"] == 0 and expected["received"]["unseeded"] == {"same": True}
    assert expected["received"]["n = 3"]["sequences"].keys() == {"0", "1", "2"}
    for act in (lambda: os.kill(pid_of(deployment.server, "gateway.0"), signal.SIGKILL), deployment.restart):
        received = run(act)
        assert received["numRepeats"] > 0
        assert_same(received["received"], expected["received"])


def test_a_batch_outlives_the_gateway_of_its_own_server(tiny_model: Path) -> None:
    with LLM(**tiny(tiny_model)) as llm:
        assert llm.server is not None
        params = SamplingParams(temperature=1, seed=3, max_tokens=100, ignore_eos=True)
        (gateway,) = [
            one for one in psutil.Process(llm.server.pid).children() if one.cmdline()[0] == "pipeline: gateway.0"
        ]
        (expected,) = llm.generate("Once", params)

        def prompts() -> Iterator[str]:
            yield from ["Once"] * 8
            gateway.kill()
            yield from ["Once"] * 8

        outputs = llm.generate(prompts(), params)
        assert [output.outputs for output in outputs] == [expected.outputs] * 16
        gateway.wait(0)


def assert_same(received: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind, value in expected.items():
        assert received[kind] == value, kind


class Deployment:
    """A server with two gateways and an API key, at TCP ports of its own."""

    def __init__(self) -> None:
        self._port = free_port(2)
        self.server = self._started()
        self._expected: dict[str, Any] = {}

    def _started(self) -> Server:
        return Server(
            f"gateway.zmq=tcp://127.0.0.1:{self._port}",
            "gateway.replicas=2",
            "supervisor.max_restarts=100",
            "supervisor.drain_timeout_s=0.1",
            environ={"PIPELINE_API_KEYS": KEY},
        )

    def address(self, gateway: int = 0) -> str:
        return f"tcp://127.0.0.1:{self._port + gateway}"

    def clients(self, gateway: int = 0) -> AbstractAsyncContextManager[Clients]:
        return connected(self.address(gateway), KEY)

    async def expected(self, clients: Clients) -> dict[str, Any]:
        """The undisturbed run."""
        self._expected = self._expected or await clients.run()
        return self._expected

    async def until_idle(self) -> None:
        self.server.look()
        await asyncio.to_thread(self.server.until, lambda health: health["status"] == "ok")
        await asyncio.to_thread(self.server.until_idle)
        self.server.look()

    def restart(self) -> None:
        self.server.__exit__()
        self.server = self._started()


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.server.__exit__()
