"""Settings of the supervisor change the behavior of a whole server."""

import re
import signal
import socket
import threading
import urllib.request
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.stages.gateway.peers import until

pytestmark = pytest.mark.usefixtures("smollm2_dir")

LATE_S = 5.0
"""Longer than the default timeout plus the gateway's margin."""


def test_start_timeout_s_limits_the_start() -> None:
    with Server("supervisor.start_timeout_s=0.001", until_ready=False, options=("--instant",)) as server:
        server.wait_for_line(
            r"timed out after 0\.001 s waiting for stages to be ready.*; if .* raise supervisor\.start_timeout_s", 60
        )
        assert server.process.wait(30) == 1


def test_stop_timeout_s_limits_the_stop_of_a_stage_that_hangs() -> None:
    with Server("supervisor.stop_timeout_s=0.4", options=("--instant",)) as server:
        server.stage("detokenize").send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(r"detokenize\.0 did not stop within 0\.4 s; killing it", 60)
        assert server.process.wait(30) == 3


def test_health_timeout_s_limits_a_stage_s_answer() -> None:
    """With ten minutes, a stage that answers after the default timeout is not late."""
    answers: list[dict[str, Any]] = []
    with Server("supervisor.health_timeout_s=600", "supervisor.start_timeout_s=600", options=("--instant",)) as server:
        stage = server.stage("detokenize")
        stage.send_signal(signal.SIGSTOP)
        checker = threading.Thread(target=lambda: answers.append(server.health()), daemon=True)
        checker.start()
        checker.join(LATE_S)
        stage.send_signal(signal.SIGCONT)
        until(lambda: answers, "health has answered")
        assert answers[0]["status"] == "ok"


def test_the_admin_listener_s_address_and_the_sizes_of_arenas_are_set() -> None:
    sizes = {"ingest": 2**20, "schedule": 2**21, "execute": 2**22 + 2**20}
    sets = [f"{stage}.arena_bytes={size}" for stage, size in sizes.items()]
    sets += ["gateway.admin_port=0", "gateway.admin_host=127.0.0.2"]
    with Server(*sets, options=("--instant",)) as server:
        match = re.search(r"admin=http://(127\.0\.0\.2):(\d+)", server.wait_for_line("ready on", 1))
        assert match
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(match[2])), timeout=30)
        with urllib.request.urlopen(f"http://{match[1]}:{match[2]}/metrics", timeout=30) as response:
            metrics = response.read().decode()
        found = dict(re.findall(r'pipeline_stage_arena_bytes\{.*?stage="(\w+)\.0".*?\} ([\d.e+]+)', metrics))
        assert {stage: float(size) for stage, size in found.items() if stage in sizes} == sizes
