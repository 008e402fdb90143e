"""/health says whether continued streams are exact."""

from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.health import body_of
from tests.stages.gateway.gate import Gate


def test_health_says_that_a_cpu_is_batch_invariant(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        response = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
        assert response.result().json()["batch_invariant"] is True


@pytest.mark.parametrize("batch_invariant", [False, None])
def test_health_of_a_gpu_and_of_a_server_that_starts(batch_invariant: bool | None) -> None:
    for health in (None, m.Health(1, "ok", [], None)):
        assert body_of(health, "ok", None, 0, batch_invariant).batch_invariant is batch_invariant
