"""The number of gateways, ingests and detokenizers changes while clients of every kind are served: each receives
exactly what it would have received. Processes die meanwhile, too.

All tests share one server, which has one process of each stage between them. PIPELINE_ALL_KILLS=1 kills more.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from pipeline import LLM, SamplingParams
from tests.e2e.observed import Metrics
from tests.e2e.recovery.streams import Stream
from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server

ALL = bool(os.environ.get("PIPELINE_ALL_KILLS"))
MAX_TOKENS = 24
NUM_BEFORE, NUM_AFTER = 20, 120
"""Events of all streams before the number of processes grows, and before it shrinks again."""
VICTIMS = ("schedule.0", "ingest.0", "detokenize.0", "execute.0") if ALL else ("schedule.0",)
STAGES = ("ingest", "detokenize", "gateway")
DYING = STAGES if ALL else ("ingest", "gateway")
PROMPTS = [f"Item {number} of the list is" for number in range(6)]
SAMPLED = [SamplingParams(temperature=1.0, seed=number, max_tokens=40, ignore_eos=True) for number in range(6)]
ALONE = ["detokenize.0", "execute.0", "gateway.0", "ingest.0", "schedule.0"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    rules = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
    with Server(*rules) as server:
        yield server


@pytest.fixture(autouse=True)
def restored(server: Server) -> Iterator[None]:
    """Each test leaves one process of each stage, all idle."""
    yield
    server.look()
    if sorted(names(server.health())) != ALONE:
        scale(server, *(f"{stage}.replicas=1" for stage in STAGES))
    assert sorted(names(server.until_idle())) == ALONE


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


@pytest.fixture(scope="module")
def undisturbed_ids(server: Server) -> list[list[int]]:
    return generated(server)


def generated(server: Server) -> list[list[int]]:
    """The ids of a client over ZeroMQ."""
    with LLM.attach(server.zmq) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, SAMPLED)]


def scale(server: Server, *sets: str) -> subprocess.CompletedProcess[str]:
    """`pipeline reload --set …`"""
    command = [sys.executable, "-m", "pipeline", "reload", "--port", server.url.rpartition(":")[2]]
    for one in sets:
        command += ["--set", one]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def names(health: dict[str, Any]) -> list[str]:
    return [one["name"] for one in health["stages"]]


class Scaler:
    """Changes the numbers in a thread, at events of the streams."""

    def __init__(self, server: Server, ledger: Ledger, *steps: tuple[int, Callable[[], Any]]) -> None:
        self._steps = list(steps)
        self._pool = ThreadPoolExecutor(1)
        self.results: list[Future[Any]] = []
        ledger.on_event(self._on_event)

    def _on_event(self, num_events: int) -> None:
        while self._steps and num_events >= self._steps[0][0]:
            self.results.append(self._pool.submit(self._steps.pop(0)[1]))

    def outcomes(self) -> list[Any]:
        """What each step returned, in order."""
        assert not self._steps, f"{len(self._steps)} steps were not taken"
        return [one.result(120) for one in self.results]


@pytest.mark.parametrize("stages", [("ingest", "detokenize"), ("gateway",)])
def test_clients_receive_what_they_would_have_received(
    server: Server, undisturbed: dict[str, Any], undisturbed_ids: list[list[int]], stages: tuple[str, ...]
) -> None:
    """The number grows and shrinks while streams run. The second half of them begins between the two."""
    ledger = Ledger()
    is_grown = threading.Event()
    seen: list[list[str]] = []

    def grow() -> subprocess.CompletedProcess[str]:
        done = scale(server, *(f"{stage}.replicas=2" for stage in stages))
        server.look()
        seen.append(names(server.health()))
        is_grown.set()
        return done

    scaler = Scaler(
        server,
        ledger,
        (NUM_BEFORE, grow),
        (NUM_AFTER, lambda: scale(server, *(f"{stage}.replicas=1" for stage in stages))),
    )

    async def both() -> dict[str, Any]:
        kinds = list(requests(MAX_TOKENS).items())
        first = asyncio.create_task(run(server.url, dict(kinds[::2]), ledger))
        await asyncio.to_thread(is_grown.wait, 60)
        over_zmq = asyncio.create_task(asyncio.to_thread(generated, server))
        received = await run(server.url, dict(kinds[1::2]), ledger) | await first
        return received | {"zmq": await over_zmq}

    received = asyncio.run(both())
    for outcome in scaler.outcomes():
        assert outcome.returncode == 0, outcome.stderr
    assert {f"{stage}.1" for stage in stages} <= set(seen[0]) and sorted(names(server.health())) == ALONE
    assert received.pop("zmq") == undisturbed_ids
    for kind, value in undisturbed.items():
        assert received[kind] == value, kind


def process_named(server: Server, title: str) -> psutil.Process:
    """A process of the server that may be starting: wait for its title."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for child in psutil.Process(server.process.pid).children():
            try:
                if child.cmdline()[:1] == [f"pipeline: {title}"]:
                    return child
            except psutil.NoSuchProcess:
                continue
    raise AssertionError(f"no process is titled {title}")


@pytest.mark.parametrize("stage", DYING)
def test_if_a_new_process_dies_the_reload_fails_and_the_server_serves_as_before(server: Server, stage: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(scale, server, f"{stage}.replicas=3")
        process_named(server, f"{stage}.2").kill()
        outcome = reload.result(60)
    assert outcome.returncode == 1
    assert f"{stage}.replicas stays 1: {stage}.2: was killed by SIGKILL" in outcome.stderr
    assert sorted(names(server.health())) == ALONE
    again = scale(server, f"{stage}.replicas=2")
    assert again.returncode == 0 and f"{stage}.replicas: 1 → 2: adds 1 process" in again.stdout


@pytest.mark.parametrize("victim", VICTIMS)
def test_another_stage_may_die_meanwhile(server: Server, undisturbed: dict[str, Any], victim: str) -> None:
    """It dies while new processes of all three stages start, and again while they leave."""
    ledger = Ledger()
    grow = [f"{stage}.replicas=2" for stage in STAGES]

    def scale_and_kill(sets: list[str], is_begun: Callable[[], object]) -> subprocess.CompletedProcess[str]:
        with ThreadPoolExecutor(1) as pool:
            reload = pool.submit(scale, server, *sets)
            is_begun()
            process_named(server, victim).kill()
            return reload.result(120)

    scaler = Scaler(
        server,
        ledger,
        (20, lambda: scale_and_kill(grow, lambda: process_named(server, "detokenize.1"))),
        (80, lambda: scale_and_kill([one.replace("2", "1") for one in grow], lambda: None)),
    )
    received = asyncio.run(run(server.url, requests(MAX_TOKENS), ledger))
    for outcome in scaler.outcomes():
        assert outcome.returncode == 0, outcome.stderr
    for kind, value in undisturbed.items():
        assert received[kind] == value, kind
    server.until(lambda health: health["status"] == "ok")


def test_connections_that_wait_for_a_gateway_that_leaves_are_served(server: Server) -> None:
    """Connections come all the time, while gateways come and go."""
    is_over = threading.Event()
    problems: list[object] = []

    def connect() -> None:
        while not is_over.is_set():
            stream = Stream(server, max_tokens=2)
            stream.join(60)
            if stream.events[-1:] != ["[DONE]"]:
                problems.append(stream.broken or stream.events)

    clients = [threading.Thread(target=connect) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        for num in (3, 1):
            assert scale(server, f"gateway.replicas={num}").returncode == 0
    finally:
        is_over.set()
        for client in clients:
            client.join(60)
    assert not problems


def test_a_zmq_stream_that_does_not_end_in_time_goes_on_at_another_gateway(server: Server) -> None:
    """Metrics name the processes that run meanwhile."""
    sampled = [SamplingParams(temperature=1.0, seed=number, max_tokens=200, ignore_eos=True) for number in range(2)]
    with LLM.attach(server.zmq) as llm:
        undisturbed = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS[:2], sampled)]
    assert scale(server, "gateway.replicas=2").returncode == 0
    server.look()
    assert Metrics(server).get("pipeline_stage_state", stage="gateway.1", state="ready") == 1
    with LLM.attach(f"{server.zmq}.1") as llm, ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(llm.generate, PROMPTS[:2], sampled)
        server.until(lambda health: health["running"] == 2)
        with stopped(server.stage("execute")):  # no stream ends meanwhile
            assert scale(server, "gateway.replicas=1", "supervisor.drain_timeout_s=0.1").returncode == 0
            assert not outputs.done(), "it would prove nothing"
        scale(server, "supervisor.drain_timeout_s=30")
        assert [list(one.outputs[0].token_ids) for one in outputs.result(120)] == undisturbed
    with pytest.raises(ValueError, match="not enough values"):
        Metrics(server).get("pipeline_stage_state", stage="gateway.1", state="ready")
