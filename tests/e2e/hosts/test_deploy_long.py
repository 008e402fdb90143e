"""Replicas that die at many moments, and autoscaling: minutes. With PIPELINE_ALL_REPLICAS=1."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts.test_deploy import (
    COMPLETION,
    PATIENCE_S,
    START_S,
    Deployment,
    events,
    kill_busiest,
    settings_for,
    texts_of,
)
from tests.stages.execute.recurrent_models import VARIANTS, make

NO_ROOM = "--set", "execute.kv_cache_bytes=500GiB"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    options = settings_for(tmp_path_factory.mktemp("models"))
    with Deployment("--replicas", "2", "--replica-cpus", "0.5", *options) as deployment:
        yield deployment


@pytest.mark.parametrize("at", [1, 2, 20, 60])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"stop": ["zzzz"]}, {"n": 3}])
def test_a_replica_dies_at_any_moment(deployment: Deployment, at: int, extra: dict[str, Any]) -> None:
    body = COMPLETION | extra
    calm = texts_of(events(deployment.url, body))

    def kill() -> None:
        kill_busiest(deployment, 1)

    assert texts_of(events(deployment.url, body, at=(at, kill))) == calm
    deployment.until(lambda found: [one["status"] for one in found] == ["ok", "ok"], "Serve has replaced the replica")


def test_streams_of_a_model_with_recurrent_layers_go_on_at_another_replica(tmp_path: Path) -> None:
    variant = VARIANTS["qwen3_5"]
    model = make(replace(variant, changes=variant.changes | {"max_position_embeddings": 2048}))
    options = [*settings_for(tmp_path, model), "--set", "execute.kv_cache_bytes=32MiB"]
    with Deployment("--replicas", "2", "--replica-cpus", "0.5", *options) as deployment:
        deployment.until(lambda found: [one["status"] for one in found] == ["ok", "ok"], "both replicas serve")
        for extra in ({}, {"logprobs": 2}, {"n": 2}):
            body = COMPLETION | extra
            calm = texts_of(events(deployment.url, body))
            assert texts_of(events(deployment.url, body, at=(20, lambda: kill_busiest(deployment, 1)))) == calm
            deployment.until(lambda found: [one["status"] for one in found] == ["ok", "ok"], "Serve has replaced it")
        assert deployment.metric("pipeline_ingress_broken_streams_total") == 0


def test_open_requests_scale_replicas_up_and_down(tmp_path: Path) -> None:
    options = ["--min-replicas", "1", "--max-replicas", "2", "--target-open-requests", "2", "--replica-cpus", "0.5"]
    options += ["--upscale-delay", "2s", "--downscale-delay", "5s"]
    with Deployment(*options, *settings_for(tmp_path)) as deployment, ThreadPoolExecutor(8) as threads:
        assert len(deployment.replicas()) == 1
        stop = threading.Event()

        def load(number: int) -> None:
            while not stop.is_set():
                events(deployment.url, COMPLETION | {"seed": number})

        clients = [threads.submit(load, number) for number in range(8)]
        try:
            deployment.until(lambda found: len([one for one in found if one["status"] == "ok"]) == 2, "there are two")
        finally:
            stop.set()
        for client in clients:
            client.result()
        end_s = time.monotonic() + 10 * PATIENCE_S
        while len(deployment.replicas()) > 1:
            assert time.monotonic() < end_s, "it is scaled down"
            events(deployment.url, COMPLETION)  # is never broken


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    deployment = Deployment("--replicas", "1", "--replica-cpus", "0.5", *settings_for(tmp_path), *NO_ROOM)
    try:
        assert deployment.process.wait(START_S) == 1
        last = [line for line in deployment.lines if line.startswith("pipeline deploy: error: ")]
        assert len(last) == 1 and "replicas could not start" in last[0] and "execute.kv_cache_bytes" in last[0]
    finally:
        deployment.__exit__()


def test_ctrl_c_ends_a_start(tmp_path: Path) -> None:
    deployment = Deployment("--replicas", "2", "--replica-cpus", "0.5", *settings_for(tmp_path))
    try:
        end_s = time.monotonic() + START_S
        while not any(line.startswith("starting 2 replicas") for line in deployment.lines):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        deployment.process.send_signal(signal.SIGINT)
        assert deployment.process.wait(PATIENCE_S) == 0
        assert not deployment.url
    finally:
        deployment.__exit__()
