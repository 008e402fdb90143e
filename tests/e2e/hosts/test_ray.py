"""An executor on a host that Ray chooses: a cluster of raylets on this machine, each treated as another host.

By default, only the refusal of an executor that fits nowhere. PIPELINE_ALL_RANKS=1 adds a server with two ranks, the
deaths of a rank, of the actor and of the host, and a second server in the same cluster. test_hosts.py needs no Ray."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.hosts.test_hosts import until_back
from tests.e2e.observed import pipeline
from tests.e2e.recovery.test_recovery import MAX_TOKENS, MOMENTS, assert_same, kill, pids, run_and
from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server
from tests.guardian import guard

pytestmark = pytest.mark.usefixtures("smollm2_dir")

ALL = bool(os.environ.get("PIPELINE_ALL_RANKS"))
RULES = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
CLUSTER = Path(__file__).parent.parent.parent / "hosts" / "cluster.py"


class Cluster:
    """A head with too few CPUs for the executor, and one node that has enough."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(CLUSTER), "1", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        guard(self.process)
        self.address, *raylets = self._read()
        self.raylets = [int(pid) for pid in raylets]

    def _read(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster has ended"
        return line.split()

    def add(self, cpus: int) -> None:
        """Start another node."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"add {cpus}\n")
        self.process.stdin.flush()
        self.raylets += map(int, self._read())

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    yield one
    one.close()


def ray_server(cluster: Cluster, *sets: str) -> Server:
    remote = ("execute.launcher=ray", f"ray.address={cluster.address}", "ray.bundle_cpus=2", *sets)
    return Server(*RULES, *remote, options=("--tp", "2") if ALL else ())


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    with ray_server(cluster) as one:
        yield one


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, Any]:
    return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


def actor_of(server: Server) -> psutil.Process:
    """The parent of the executor."""
    execute = psutil.Process(pids(server)["execute.0"])
    parent = execute.parent()
    assert parent is not None and parent.cmdline()[0].startswith("ray::"), parent
    assert execute.nice() == psutil.Process().nice(), "Ray's workers have a lower priority"
    return parent


def test_an_executor_that_fits_nowhere_is_refused_by_what_the_nodes_have(cluster: Cluster) -> None:
    sets = (
        "execute.launcher=ray",
        f"ray.address={cluster.address}",
        "ray.bundle_cpus=9",
        "ray.placement_timeout_s=0.5",
    )
    with Server(*sets, until_ready=False) as server:
        line = server.wait_for_line("cannot start", 60.0)
        assert server.process.wait(20) == 1
    assert "ray: no node has 9 free CPUs; nodes have " in line


if ALL:

    @pytest.mark.parametrize("victim", ["execute.1", "actor"])
    def test_no_client_notices_the_death_of_a_process(server: Server, expected: dict[str, Any], victim: str) -> None:
        before = pids(server)
        pid = actor_of(server).pid if victim == "actor" else before[victim]
        assert_same(run_and(server, MOMENTS["in the middle"], lambda: kill(pid)), expected)
        until_back(server, before, "execute.0")

    def test_two_servers_share_a_cluster(cluster: Cluster, server: Server, expected: dict[str, Any]) -> None:
        cluster.add(2)
        with ray_server(cluster) as other:
            assert_same(asyncio.run(run(other.url, requests(MAX_TOKENS), Ledger())), expected)
            before = pids(server)
            kill(pids(other)["execute.0"])
            other.until(lambda health: health["status"] == "ok")
            assert pids(server) == before

    def test_if_the_host_disappears_the_executor_runs_on_another_one(
        cluster: Cluster, server: Server, expected: dict[str, Any]
    ) -> None:
        listed = pipeline("ps", "--port", server.url.rpartition(":")[2]).stdout
        assert any(line.startswith("execute.0") and " on " in line for line in listed.splitlines()), listed
        before = pids(server)
        raylet = next(pid for pid in cluster.raylets if pid in {one.pid for one in actor_of(server).parents()})
        cluster.add(2)
        assert_same(run_and(server, MOMENTS["in the middle"], lambda: kill(raylet)), expected)
        until_back(server, before, "execute.0")
        assert raylet not in {one.pid for one in actor_of(server).parents()}
