"""An executor on another host, reached over encrypted tcp: the same replies, whatever dies. The host is this machine,
and its agent is started without Ray (tests/e2e/hosts/test_ray.py has Ray)."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.observed import pipeline
from tests.e2e.recovery.test_recovery import MAX_TOKENS, MOMENTS, assert_same, kill, pids, run_and
from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server

pytestmark = pytest.mark.usefixtures("smollm2_dir")

RULES = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
REMOTE = ("execute.launcher=ray", "transport.host_timeout_s=3")
DEATHS = ["agent"]
if os.environ.get("PIPELINE_ALL_RANKS"):
    DEATHS = ["execute.0", "schedule.0", "agent", "silent agent"]


@pytest.fixture(scope="module")
def remote() -> Iterator[Server]:
    options = ("--tp", "2") if os.environ.get("PIPELINE_ALL_RANKS") else ()
    with Server(*RULES, *REMOTE, options=options, module="tests.hosts.local_server") as server:
        yield server


@pytest.fixture(scope="module")
def expected(remote: Server) -> dict[str, Any]:
    """The replies of a server without hosts; in a short run, those of this one."""
    if not os.environ.get("PIPELINE_ALL_RANKS"):
        return asyncio.run(run(remote.url, requests(MAX_TOKENS), Ledger()))
    with Server(*RULES) as server:
        return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


def agent_of(server: Server) -> psutil.Process:
    """The process of the agent, which here is also the one that finds hosts."""
    found = [one for one in psutil.Process(server.process.pid).children() if one.cmdline()[:1] == ["pipeline: ray.0"]]
    assert len(found) == 1
    return found[0]


def is_running(pid: int) -> bool:
    """Whether a process has not ended, reaped or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_back(server: Server, before: dict[str, int], name: str) -> None:
    server.until(lambda health: health["status"] == "ok" and pids(server)[name] != before[name], 60.0)
    server.look()


def test_a_remote_executor_is_listed_with_its_host(remote: Server, expected: dict[str, Any]) -> None:
    assert_same(asyncio.run(run(remote.url, requests(MAX_TOKENS), Ledger())), expected)
    listed = pipeline("ps", "--port", remote.url.rpartition(":")[2])
    line = next(line for line in listed.stdout.splitlines() if line.startswith("execute.0"))
    assert re.search(r"execute\.0 +\d+ +ready +\d.* MiB .*rows.* on \S+", line), line
    pid = pids(remote)["execute.0"]
    assert psutil.Process(pid).ppid() == agent_of(remote).pid
    addresses = {one.laddr.ip for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}, "it listens at transport.host only"


@pytest.mark.parametrize("victim", DEATHS)
def test_no_client_notices_a_death(remote: Server, expected: dict[str, Any], victim: str) -> None:
    before = pids(remote)
    agent = agent_of(remote)
    name = victim if victim.endswith(".0") else "execute.0"

    def act() -> None:
        match victim:
            case "agent":
                agent.kill()
            case "silent agent":
                agent.send_signal(signal.SIGSTOP)
            case _:
                kill(before[victim])

    assert_same(run_and(remote, MOMENTS["in the middle"], act), expected)
    until_back(remote, before, name)
    assert (agent_of(remote).pid == agent.pid) == victim.endswith(".0")
    if victim == "silent agent":
        remote.wait_for_line(r"has not answered for 3 s \(transport.host_timeout_s\); finding a host again", 0.0)
    end_s = time.monotonic() + 10.0
    while is_running(before[name]):
        assert time.monotonic() < end_s, f"{name} of the host before still runs"
        time.sleep(0.02)


def test_it_is_restarted_on_purpose_and_refuses_to_be_recorded(remote: Server, tmp_path: Any) -> None:
    port = remote.url.rpartition(":")[2]
    before = pids(remote)
    done = pipeline("restart", "execute.0", "--port", port)
    assert done.returncode == 0, done.stderr
    until_back(remote, before, "execute.0")
    refused = pipeline("record", "execute.0", "--out", str(tmp_path / "x.rec"), "--port", port)
    assert refused.returncode and "execute.0 can't be recorded, because it runs on another host" in refused.stderr
