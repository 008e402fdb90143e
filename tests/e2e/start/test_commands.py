"""A stage that dies does not block the commands sent to it."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.server import Server
from tests.stages.gateway.peers import until

PROMISED_S = 600.0
"""How long the command would wait for a live but silent stage."""

pytestmark = pytest.mark.usefixtures("smollm2_dir")


def test_a_command_to_a_stage_that_dies_returns_an_error_without_a_wait(tmp_path: Path) -> None:
    answers: dict[str, Any] = {}
    recording = tmp_path / "ingest.rec"
    with Server(options=("--instant",)) as server:
        (name,) = (one for one in find_servers() if one.startswith(f"{server.process.pid}-"))
        stage = server.stage("detokenize")
        stage.send_signal(signal.SIGSTOP)  # it can't reply any more

        def send() -> None:
            with Admin(name) as admin:
                record = m.Record(0, str(recording))
                answers.update(admin.send_command(record, ["detokenize", "ingest"], PROMISED_S))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        until(recording.exists, "ingest has received the command")
        stage.kill()
        sender.join(60)
        assert not sender.is_alive()
        assert answers["detokenize.0"].error
        server.until(lambda health: health["status"] == "ok")
        server.look()
