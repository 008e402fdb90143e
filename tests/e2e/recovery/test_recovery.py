"""A stage dies while clients of every kind are served, over HTTP and ZeroMQ: each receives exactly what it would have
received.

By default each stage is killed at one moment of short replies. PIPELINE_ALL_KILLS=1 kills each at every moment of
longer ones.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.observed import until_traced
from tests.e2e.recovery_streams import LONG, STORY, Ledger, requests, run
from tests.e2e.server import Server
from tests.e2e.zmq_streams import Once, connected
from tests.runtime.test_tracing import check

RESTARTED = ("ingest", "schedule", "execute", "detokenize")
ALL = bool(os.environ.get("PIPELINE_ALL_KILLS"))
MAX_TOKENS, MIDDLE, NEAR_END = (40, 130, 280) if ALL else (24, 80, 170)
BLOCK_SIZE = 16
"""Of the prefix cache, in tokens."""
MOMENTS = {"while prompts are read": 1, "in the middle": MIDDLE, "near the end": NEAR_END}
"""Events of all streams before the kill."""
NUM_THOUGHTS = 6
"""Events of a reasoning before it is ended."""
KILLS = [
    ("ingest", "while prompts are read"),
    ("schedule", "in the middle"),
    ("execute", "in the middle"),
    ("detokenize", "near the end"),
]
ZMQ_KILLS = [("schedule", "in the middle")]
if ALL:
    KILLS = [(stage, moment) for stage in RESTARTED for moment in MOMENTS]
    ZMQ_KILLS = [(stage, moment) for stage in (*RESTARTED, "gateway") for moment in MOMENTS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    rules = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
    with Server(*rules, "log_level=debug") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    found = asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))
    assert found["reasoning"][0]["reasoning"] and not found["greedy"][0]["reasoning"]
    (limited,) = found["reasoning budget"].values()
    assert limited["reasoning"].endswith("it is time for an answer.") and limited["text"]
    return found


@pytest.fixture(scope="module")
def undisturbed_zmq(server: Server) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with connected(server.zmq) as clients:
            return await clients.run()

    return asyncio.run(run())


def pids(server: Server) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in server.health()["stages"]}


def kill(pid: int) -> None:
    psutil.Process(pid).kill()


def post(server: Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def num_cached(server: Server) -> int:
    """Prompt tokens found in the prefix cache."""
    return int(server.health()["counters"]["cached_tokens"])


def run_and(server: Server, num_events: int, act: Callable[[], None]) -> dict[str, Any]:
    """Run all requests, and call `act` once after so many events of all streams. Waits until the server is idle.

    The prompt of "prefix hit" is in the prefix cache when it comes: it has been found there before `act`, unless that
    comes while prompts are still read."""
    num_prefix = post(server, "/v1/completions", prompt=LONG, max_tokens=1)["usage"]["prompt_tokens"]
    num_before = num_cached(server)
    ledger = Ledger()
    acted: list[bool] = []

    def on_event(number: int) -> None:
        if number >= num_events and not acted:
            acted.append(True)
            if number >= MOMENTS["in the middle"]:
                assert num_cached(server) - num_before >= num_prefix // BLOCK_SIZE * BLOCK_SIZE, "no prefix hit"
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


@pytest.mark.parametrize("stage", [None, "schedule", "execute"])
def test_a_reasoning_is_ended_while_it_is_written(
    server: Server, undisturbed: dict[str, Any], stage: str | None
) -> None:
    """What the client has stays, and the message and the answer follow; also if a stage dies then."""
    path, body = requests(4 * MAX_TOKENS)["reasoning"]
    message = " But now it is time for an answer."
    body |= {"reasoning_control": True, "reasoning_budget_message": message, "request_id": "thinks", "ignore_eos": True}
    ledger = Ledger()
    before = pids(server)

    def on_event(number: int) -> None:
        if number == NUM_THOUGHTS:
            control = {"action": "reasoning_end"}
            assert post(server, "/v1/chat/completions/thinks/control", **control) == {"success": True}
        if number == NUM_THOUGHTS + 3 and stage is not None:
            kill(before[f"{stage}.0"])

    ledger.on_event(on_event)
    (reply,) = asyncio.run(run(server.url, {"reasoning": (path, body)}, ledger))["reasoning"].values()
    free = undisturbed["reasoning"][0]["reasoning"]
    thought = reply["reasoning"].removesuffix(message)
    assert reply["reasoning"] != thought and free.startswith(thought) and len(thought) < len(free)
    assert reply["text"]
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    server.look()


@pytest.mark.parametrize(("stage", "moment"), ZMQ_KILLS)
async def test_no_zeromq_client_notices_the_death_of_a_stage(
    server: Server, undisturbed_zmq: dict[str, Any], stage: str, moment: str
) -> None:
    """Streams without a seed equal a second one with the seed that the server chose."""
    before = await asyncio.to_thread(pids, server)
    async with connected(server.zmq) as clients:
        clients.on_output = once = Once(MOMENTS[moment], lambda: kill(before[f"{stage}.0"]))
        received = await clients.run()
        assert once.is_done, f"only {clients.num_outputs} outputs came"
        assert (clients.num_repeated > 0) == (stage == "gateway"), "the other stages leave connections alone"
    assert_same(received, undisturbed_zmq)
    await asyncio.to_thread(server.until, lambda health: health["status"] == "ok")
    await asyncio.to_thread(server.until_idle)
    assert_restarted(before, await asyncio.to_thread(pids, server), stage)
    server.look()


def test_streams_without_a_seed_go_on_as_one_sequence(server: Server) -> None:
    """What they would have been is unknown. But each id must have the log probability that it has behind all ids
    before it, and the text must be theirs: none may be missing, repeated or exchanged."""
    before = pids(server)
    body = {"prompt": STORY, "max_tokens": MAX_TOKENS, "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0}
    body |= {"stream": True, "return_token_ids": True}
    streams = {f"unseeded {i}": ("/v1/completions", body) for i in range(4)}
    ledger = Ledger()
    ledger.on_event(lambda number: kill(before["schedule.0"]) if number == 2 * MAX_TOKENS else None)
    received = [one[0] for one in asyncio.run(run(server.url, streams, ledger)).values()]
    assert len({one["text"] for one in received}) == len(streams), "they differ"
    prompt = post(server, "/tokenize", prompt=STORY)["tokens"]
    for one in received:
        assert len(one["ids"]) == MAX_TOKENS
        reply = post(server, "/v1/completions", prompt=prompt + one["ids"], max_tokens=1, prompt_logprobs=0)
        found = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
        found = [logprobs[str(token_id)]["logprob"] for logprobs, token_id in zip(found, one["ids"], strict=True)]
        assert one["logprobs"] == pytest.approx(found, abs=1e-3)
        assert one["text"] == post(server, "/detokenize", tokens=one["ids"])["prompt"]
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    assert_restarted(before, pids(server), "schedule")
    server.look()


@contextmanager
def traced(server: Server, out: Path) -> Iterator[list[dict[str, Any]]]:
    """`pipeline trace` during the body; its events afterwards."""
    command = [sys.executable, "-m", "pipeline", "trace", "--seconds", "100", "--out", str(out)]
    events: list[dict[str, Any]] = []
    tracing = subprocess.Popen([*command, "--pid", str(server.process.pid)], stderr=subprocess.PIPE, text=True)
    until_traced(tracing)
    yield events
    tracing.send_signal(signal.SIGINT)
    _, stderr = tracing.communicate(timeout=60)
    assert tracing.returncode == 0, stderr
    events += check(out.read_bytes())


def spans_of_restarts(server: Server, since_s: float) -> dict[str, dict[str, Any]]:
    """By name, what the supervisor adds to a trace."""
    (name,) = [name for name in find_servers() if name.startswith(f"{server.process.pid}-")]
    with Admin(name) as admin:
        return {span.name: span.args for span in admin.restarts(since_s).records}


def test_no_client_notices_the_deaths_of_two_stages_at_once(
    server: Server, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """A trace shows them, and the way of requests through the processes before and after."""
    before = pids(server)

    def kill_both() -> None:
        kill(before["schedule.0"])
        kill(before["execute.0"])

    with traced(server, tmp_path / "trace.json") as events:
        assert_same(run_and(server, MOMENTS["in the middle"], kill_both), undisturbed)
    after = pids(server)
    assert_restarted(before, after, "schedule", "execute")
    for stage in ("schedule.0", "execute.0"):
        (death,) = [event for event in events if event["name"] == f"{stage} died"]
        assert death["ph"] == "X" and death["pid"] == server.process.pid and death["dur"] > 0
        assert "SIGKILL" in death["args"]["reason"]
        assert (death["args"]["pid"], death["args"]["next_pid"]) == (before[stage], after[stage])
        paths = defaultdict(set)
        for event in events:
            if event["ph"] in "stf":
                paths[event["id"]].add(event["pid"])
        assert any({before[stage], after[stage]} <= path for path in paths.values())


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
    before, begin_s = pids(server), time.monotonic()
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
    counted = {line.split(".")[0] for line in ps.stdout.decode().splitlines() if "↻" in line}
    assert counted - {"gateway"} == set(RESTARTED), "and `ps` counts them"
    spans = spans_of_restarts(server, begin_s)
    assert {name: args["reason"] for name, args in spans.items()} == {
        f"{stage}.0 restarts": "pipeline restart" for stage in RESTARTED
    }
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
    before, begin_s = pids(server), time.monotonic()
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
    spans = spans_of_restarts(server, begin_s)
    assert spans["server reloads"]["changed"] == "chat.tool_call_parser"
    for stage in ("detokenize", "ingest", "gateway"):
        assert spans[f"{stage}.0 restarts"]["reason"] == "pipeline reload: chat.tool_call_parser"
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
