"""Several gateways, ingests and detokenizes: the same texts, distributed work, their deaths, and the same shutdown."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from pipeline import LLM, SamplingParams
from pipeline.metrics.stats import GatewayCounts
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.observed import Metrics
from tests.e2e.recovery.streams import MODEL, Stream
from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server

pytestmark = pytest.mark.usefixtures("smollm2_dir")

REPLICATED = ("gateway.replicas=2", "ingest.replicas=2", "detokenize.replicas=3")
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def replicated() -> Iterator[Server]:
    with Server(*REPLICATED, "schedule.policy=priority", "chat.reasoning_parser=qwen3") as server:
        yield server


def complete(server: Server, number: int) -> list[str]:
    """The texts of one request, over a connection of its own. Some prompts go through shared memory."""
    body = {
        "model": MODEL,
        "prompt": f"Item {number} of the list is" + " a very long story about it," * (120 if number % 6 == 0 else 1),
        "max_tokens": 12,
        "n": 1 + number % 3,
        "seed": number,
        "stop": [" the", "\n\n"],
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return [choice["text"] for choice in answer["choices"]]


def connections(server: Server, name: str) -> int:
    """The number of connections that a process has accepted so far."""
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process_of(server, name).net_connections("tcp"))


def process_of(server: Server, name: str) -> psutil.Process:
    living = [child for child in server.seen.values() if child.is_running()]
    (process,) = [child for child in living if child.cmdline()[:1] == [f"pipeline: {name}"]]
    return process


def test_metrics_of_any_gateway_cover_the_whole_server(replicated: Server) -> None:
    before = Metrics(replicated)
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: complete(replicated, number), range(1, 9)))
    replicated.until_idle()
    num_sequences = sum(1 + number % 3 for number in range(1, 9))
    for _ in range(6):  # each over a connection of its own, which either gateway may accept
        metrics = Metrics(replicated)
        ended = [metrics.get("vllm:request_success_total", finished_reason=r) for r in ("stop", "length")]
        was = [before.get("vllm:request_success_total", finished_reason=r) for r in ("stop", "length")]
        assert sum(ended) - sum(was) == num_sequences
        count = "vllm:time_to_first_token_seconds_count"
        assert metrics.get(count) - before.get(count) == num_sequences
        for name in ("gateway.0", "gateway.1", "ingest.1", "detokenize.2"):
            assert metrics.get("pipeline_stage_state", stage=name, state="ready") == 1


def test_replicas_return_the_same_texts_as_one_of_each(server: Server, replicated: Server) -> None:
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        shared = list(clients.map(lambda number: complete(replicated, number), range(NUM_REQUESTS)))
        alone = list(clients.map(lambda number: complete(server, number), range(NUM_REQUESTS)))
    assert shared == alone
    health = replicated.until_idle()
    assert {stage["name"] for stage in health["stages"]} == {
        *("gateway.0", "gateway.1", "ingest.0", "ingest.1", "schedule.0", "execute.0"),
        *("detokenize.0", "detokenize.1", "detokenize.2"),
    }


def test_connections_are_distributed_and_health_counts_open_requests_of_all_gateways(replicated: Server) -> None:
    streams = [Stream(replicated, max_tokens=6000) for _ in range(12)]
    for stream in streams:
        assert stream.has_text.wait(60)
    at_each = [connections(replicated, name) for name in ("gateway.0", "gateway.1")]
    assert sum(at_each) >= 12
    # All twelve go to one of two with a probability of 1 in 2048; the kernel distributes them by their ports.
    assert min(at_each) > 0
    assert replicated.health()["open_requests"] == 12
    for stream in streams:
        stream.is_leaving = True
    replicated.until_idle()


def test_an_llm_spreads_its_requests_over_all_gateways(replicated: Server) -> None:
    (name,) = [name for name in find_servers() if name.startswith(f"{replicated.process.pid}-")]

    def opened() -> list[int]:
        with Admin(name) as admin:
            counts = [stage.counts.own for stage in admin.stats().stages if stage.counts is not None]
        return [own.num_opened for own in counts if isinstance(own, GatewayCounts)]

    before = opened()
    with LLM.attach(replicated.zmq) as llm:
        outputs = llm.generate([f"Item {i} is" for i in range(24)], SamplingParams(temperature=0, max_tokens=4))
        assert len({output.request_id for output in outputs}) == 24
        assert llm._llm.max_open_sequences == 2 * llm.info.max_open_requests
    at_each = [now - then for now, then in zip(opened(), before, strict=True)]
    assert sum(at_each) == 24 and min(at_each) >= 6, "least-loaded first"
    with LLM.attach(f"{replicated.zmq}.1") as second:
        assert sorted(second._llm._gateways.addresses) == [replicated.zmq, f"{replicated.zmq}.1"]


def kill(server: Server, name: str) -> None:
    """Kill a replica, and wait until it is back."""
    process_of(server, name).kill()
    server.wait_for_line(f"{name} is back", 30)
    server.until(lambda health: health["status"] == "ok")
    server.look()


@pytest.mark.parametrize("name", ["ingest.1", "detokenize.2"])
def test_no_client_notices_the_death_of_a_replica(replicated: Server, name: str) -> None:
    kinds = {f"{kind} {i}": request for kind, request in requests(24).items() for i in range(2)}
    undisturbed = asyncio.run(run(replicated.url, kinds, Ledger()))
    ledger = Ledger()
    victim = process_of(replicated, name)
    ledger.on_event(lambda num_events: victim.kill() if num_events == 100 else None)
    received = asyncio.run(run(replicated.url, kinds, ledger))
    for kind, value in undisturbed.items():
        assert received[kind] == value, kind
    replicated.wait_for_line(f"{name} is back", 30)
    replicated.until_idle()
    replicated.look()


def test_only_the_connections_of_a_dead_gateway_break(replicated: Server) -> None:
    streams = [Stream(replicated, max_tokens=100) for _ in range(12)]
    for stream in streams:
        assert stream.has_text.wait(60)
    num_broken = connections(replicated, "gateway.1")
    kill(replicated, "gateway.1")
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive() and stream.error is None
    ended = [stream for stream in streams if stream.events[-1] == "[DONE]"]
    assert len(ended) == len(streams) - num_broken and 0 < num_broken < len(streams)
    replicated.until_idle()
    assert sum(connections(replicated, f"gateway.{i}") for i in range(2)) <= 1, "health's own"


def test_a_signal_drains_all_gateways(replicated: Server) -> None:
    """Runs last with the shared server, which it ends."""
    replicated.until_idle()
    streams = [Stream(replicated, max_tokens=40) for _ in range(8)]
    for stream in streams:
        assert stream.has_text.wait(60)
    assert replicated.stop(signal.SIGTERM) == 0
    for stream in streams:
        stream.join(30)
        assert stream.error is None
        assert stream.events[-1] == "[DONE]"
    assert not replicated.leftovers()
