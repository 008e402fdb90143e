"""A stage dies while clients of every kind are served: each receives exactly what it would have received."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server

RESTARTED = ("ingest", "schedule", "execute", "detokenize")
MAX_TOKENS = 48
MOMENTS = {"while prompts are read": 1, "in the middle": 150, "near the end": 330}
"""Events of all streams before the kill."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("supervisor.max_restarts=1000", "schedule.policy=priority", "log_level=debug") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


def pid_of(server: Server, stage: str) -> int:
    (found,) = [one["pid"] for one in server.health()["stages"] if one["name"] == f"{stage}.0"]
    return int(found)


def pids(server: Server) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in server.health()["stages"]}


def is_back(server: Server, stage: str, before: int) -> None:
    """Wait until the stage has a new process, and the server is well."""
    server.until(lambda health: health["status"] == "ok" and pid_of(server, stage) != before)
    server.look()


def same(received: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind, value in expected.items():
        assert received[kind] == value, kind


def test_undisturbed_runs_are_alike(server: Server, undisturbed: dict[str, Any]) -> None:
    same(asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger())), undisturbed)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("stage", RESTARTED)
def test_no_client_notices_the_death_of_a_stage(
    server: Server, undisturbed: dict[str, Any], stage: str, moment: str
) -> None:
    before = pids(server)
    ledger = Ledger()
    killed: list[int] = []

    def kill(num_events: int) -> None:
        if num_events >= MOMENTS[moment] and not killed:
            killed.append(before[f"{stage}.0"])
            psutil.Process(killed[0]).send_signal(signal.SIGKILL)

    ledger.on_event(kill)
    received = asyncio.run(run(server.url, requests(MAX_TOKENS), ledger))
    assert killed, f"only {ledger.num_events} events came"
    same(received, undisturbed)
    is_back(server, stage, killed[0])
    server.until_idle()
    after = pids(server)
    assert {name for name in before if before[name] != after[name]} == {f"{stage}.0"}, "only this one was restarted"


@pytest.mark.parametrize("stage", RESTARTED)
def test_an_idle_server_survives_the_death_of_a_stage(server: Server, undisturbed: dict[str, Any], stage: str) -> None:
    before = pid_of(server, stage)
    psutil.Process(before).kill()
    same(asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger())), undisturbed)
    is_back(server, stage, before)
    server.until_idle()
