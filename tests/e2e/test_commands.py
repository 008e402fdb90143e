"""What commands ask of stages is answered though a stage dies meanwhile."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.supervisor.admin_client import Admin, find_servers
from tests.e2e.server import Server
from tests.stages.gateway.peers import until

PROMISED_S = 600.0
"""How long the command would wait for a stage that lives and is silent."""

pytestmark = pytest.mark.usefixtures("smollm2_dir")


def test_who_asks_a_stage_that_dies_is_answered_and_does_not_wait_for_it(tmp_path: Path) -> None:
    answers: dict[str, Any] = {}
    recording = tmp_path / "ingest.rec"
    with Server(options=("--instant",)) as server:
        (name,) = (one for one in find_servers() if one.startswith(f"{server.process.pid}-"))
        stage = server.stage("detokenize")
        stage.send_signal(signal.SIGSTOP)  # it can't answer any more

        def ask() -> None:
            with Admin(name) as admin:
                record = m.Record(0, str(recording))
                answers.update(admin.send_command(record, ["detokenize", "ingest"], PROMISED_S))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        until(recording.exists, "ingest has been asked")
        stage.kill()
        asking.join(60)
        assert not asking.is_alive()
        assert answers["detokenize.0"].error
        assert server.process.wait(30) == 3
