"""/live: 200 while the supervisor's pings come, whatever else the server does."""

from pathlib import Path

import pytest

from pipeline.stages.gateway import readiness
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.http.access.test_guard import locked
from tests.stages.gateway.recovery.test_late_stages import make_late


def test_a_server_that_starts_lives(tmp_path: Path) -> None:
    with Gate(tmp_path, start=False) as gate:
        response = gate.client.get("/live")
        assert (response.status_code, response.content) == (200, b"")


def test_a_server_that_recovers_lives(gate: Gate) -> None:
    make_late(gate, "execute.0")
    assert gate.client.get("/ping").status_code == 503
    assert gate.client.get("/live").status_code == 200


def test_without_pings_the_supervisor_does_not_run(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "LIVE_S", 0.0)
    response = gate.client.get("/live")
    assert response.status_code == 503
    assert "the supervisor has sent nothing for 0 s" in response.json()["error"]["message"]


def test_it_needs_no_key(tmp_path: Path) -> None:
    with locked(tmp_path, admin=True) as gate:
        admin = gate.admin  # type: ignore[attr-defined]
        assert gate.client.get(f"{admin}/live").status_code == 200
        assert gate.client.get("/live").status_code == 401
