"""A stage dies while clients of every kind are served: each receives exactly what it would have received.

By default each stage is killed at one moment. PIPELINE_ALL_KILLS=1 kills each at every moment.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server

RESTARTED = ("ingest", "schedule", "execute", "detokenize")
MAX_TOKENS = 40
MOMENTS = {"while prompts are read": 1, "in the middle": 130, "near the end": 280}
"""Events of all streams before the kill."""
KILLS = [
    ("ingest", "while prompts are read"),
    ("schedule", "in the middle"),
    ("execute", "in the middle"),
    ("detokenize", "near the end"),
]
if os.environ.get("PIPELINE_ALL_KILLS"):
    KILLS = [(stage, moment) for stage in RESTARTED for moment in MOMENTS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    rules = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
    with Server(*rules, "log_level=debug") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    found = asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))
    assert found["reasoning"][0]["reasoning"] and not found["greedy"][0]["reasoning"]
    return found


def pids(server: Server) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in server.health()["stages"]}


def kill(pid: int) -> None:
    psutil.Process(pid).kill()


def run_and(server: Server, num_events: int, act: Callable[[], None]) -> dict[str, Any]:
    """Run all requests, and call `act` once after so many events of all streams. Waits until the server is idle."""
    ledger = Ledger()
    acted: list[bool] = []

    def on_event(number: int) -> None:
        if number >= num_events and not acted:
            acted.append(True)
            act()

    ledger.on_event(on_event)
    received = asyncio.run(run(server.url, requests(MAX_TOKENS), ledger))
    assert acted, f"only {ledger.num_events} events came"
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    server.look()
    return received


def assert_same(received: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind, value in expected.items():
        assert received[kind] == value, kind


def assert_restarted(before: dict[str, int], after: dict[str, int], *stages: str) -> None:
    """Only these have another process."""
    assert {name for name in before if before[name] != after[name]} == {f"{stage}.0" for stage in stages}


def test_an_idle_server_survives_the_death_of_all_its_stages(server: Server, undisturbed: dict[str, Any]) -> None:
    before = pids(server)
    for stage in RESTARTED:
        kill(before[f"{stage}.0"])
    assert_same(asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger())), undisturbed)
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), *RESTARTED)
    server.look()


@pytest.mark.parametrize(("stage", "moment"), KILLS)
def test_no_client_notices_the_death_of_a_stage(
    server: Server, undisturbed: dict[str, Any], stage: str, moment: str
) -> None:
    before = pids(server)
    received = run_and(server, MOMENTS[moment], lambda: kill(before[f"{stage}.0"]))
    assert_same(received, undisturbed)
    assert_restarted(before, pids(server), stage)


def test_no_client_notices_the_deaths_of_two_stages_at_once(server: Server, undisturbed: dict[str, Any]) -> None:
    before = pids(server)

    def kill_both() -> None:
        kill(before["schedule.0"])
        kill(before["execute.0"])

    assert_same(run_and(server, MOMENTS["in the middle"], kill_both), undisturbed)
    assert_restarted(before, pids(server), "schedule", "execute")


def test_no_client_notices_that_a_successor_dies_too(server: Server, undisturbed: dict[str, Any]) -> None:
    before = pids(server)

    def kill_twice() -> None:
        kill(before["execute.0"])
        threading.Thread(target=kill_successor, daemon=True).start()

    def kill_successor() -> None:
        server.until(lambda health: pids(server)["execute.0"] != before["execute.0"])
        successors.append(pids(server)["execute.0"])
        kill(successors[0])

    successors: list[int] = []
    assert_same(run_and(server, MOMENTS["in the middle"], kill_twice), undisturbed)
    assert successors and pids(server)["execute.0"] not in (before["execute.0"], successors[0])


def test_no_client_notices_restarts_on_purpose(server: Server, undisturbed: dict[str, Any]) -> None:
    """And the command names each process that it has replaced."""
    before = pids(server)
    commands = []

    def restart() -> None:
        for stage in RESTARTED:
            command = [sys.executable, "-m", "pipeline", "restart", stage, "--pid", str(server.process.pid)]
            commands.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    received = run_and(server, 20, restart)
    for stage, command in zip(RESTARTED, commands, strict=True):
        stdout, stderr = command.communicate(timeout=60)
        assert command.returncode == 0, stderr
        assert f"{stage}.0 was replaced; it was away for " in stdout
    ps = subprocess.run([sys.executable, "-m", "pipeline", "ps", "--pid", str(server.process.pid)], capture_output=True)
    assert ps.stdout.decode().count("↻") == len(RESTARTED), "and `ps` counts them"
    assert_same(received, undisturbed)
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), *RESTARTED)
    server.look()


def test_a_restarted_gateway_ends_its_streams_first(server: Server) -> None:
    before = pids(server)

    def restart() -> None:
        command = [sys.executable, "-m", "pipeline", "restart", "gateway.0", "--pid", str(server.process.pid)]
        commands.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))

    commands: list[subprocess.Popen[str]] = []
    streams = {kind: one for kind, one in requests(MAX_TOKENS).items() if kind in ("greedy", "n = 3")}
    ledger = Ledger()
    ledger.on_event(lambda number: restart() if number == 5 else None)
    received = asyncio.run(run(server.url, streams, ledger))
    assert set(received) == set(streams)
    _, stderr = commands[0].communicate(timeout=60)
    assert commands[0].returncode == 0, stderr
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), "gateway")
    server.look()


def reload(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "reload", "--pid", str(server.process.pid), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_reload_restarts_the_stages_that_use_what_has_changed(server: Server, undisturbed: dict[str, Any]) -> None:
    before = pids(server)
    done = []

    def change() -> None:
        done.append(
            threading.Thread(target=lambda: results.append(reload(server, "--set", "chat.tool_call_parser=hermes")))
        )
        done[0].start()

    results: list[subprocess.CompletedProcess[str]] = []
    run_and(server, 20, change)
    done[0].join(120)
    assert results[0].returncode == 0, results[0].stderr
    assert results[0].stdout.splitlines() == [
        "chat.tool_call_parser: auto → hermes: restarts detokenize, ingest, gateway",
        "changed; restarted detokenize, ingest, gateway",
    ]
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), "detokenize", "ingest", "gateway")
    server.look()


def test_a_reload_that_needs_a_new_server_changes_nothing(server: Server) -> None:
    before = pids(server)
    result = reload(server, "--set", "execute.kv_cache_bytes=1GiB", "--set", "supervisor.drain_timeout_s=5")
    assert result.returncode == 1
    assert "nothing was changed: start a new server for execute.kv_cache_bytes" in result.stderr
    assert "needs a new server: the number of KV blocks is fixed" in result.stdout
    assert pids(server) == before


def test_a_reload_keeps_what_earlier_reloads_have_changed(server: Server) -> None:
    for setting in ("supervisor.stop_timeout_s=4", "supervisor.health_timeout_s=3"):
        result = reload(server, "--set", setting)
        assert result.returncode == 0, result.stderr
    changed = result.stdout.splitlines()
    assert changed == ["supervisor.health_timeout_s: 2.0 → 3.0: used at once", "changed; restarted no stage"]
    assert reload(server).stdout == "no setting has changed\n"
    result = reload(server, "--set", "schedule.policy=fcfs", "--dry-run")
    assert "schedule.policy: priority → fcfs: restarts schedule, gateway" in result.stdout, "it wins over the start's"
