"""/health says whether continued streams are exact, and when to ask again."""

from pathlib import Path

import msgspec
import pytest

from pipeline.deploy.health_checks import _health_of
from pipeline.deploy.replicas import Numbers
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin.health import body_of
from tests.stages.gateway.gate import Gate

BACKEND = m.Backend("avx2", "0123456789ab", "bfloat16", "q4_1+q8_0", "int12", "int8")


def test_health_says_that_a_cpu_is_batch_invariant_and_when_to_ask_again(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        response = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
        assert response.result().json()["batch_invariant"] is True
        response = gate.do(gate.client.get, "/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "late", [], None), "supervisor.0")
        assert response.result().status_code == 503 and response.result().headers["Retry-After"] == "1"


@pytest.mark.parametrize("health", [None, m.Health(1, "ok", [], None)])
def test_health_has_what_the_executor_says_of_its_numbers(health: m.Health | None) -> None:
    facts = m.ExecuteFacts(64, 16, 512, 1000, is_batch_invariant=False, backend=BACKEND)
    body = body_of(health, "ok", None, 0, facts)
    assert body.batch_invariant is False
    assert body.backend == (
        "kernels=avx2 code=0123456789ab dtype=bfloat16 weights=q4_1+q8_0 activations=int12 kv_dtype=int8"
    )
    reported = _health_of(msgspec.json.encode(body))
    assert reported.numbers == Numbers(str(BACKEND), is_batch_invariant=False), "an ingress reads it"


@pytest.mark.parametrize("health", [None, m.Health(1, "ok", [], None)])
def test_health_says_nothing_of_numbers_before_the_executor_is_ready(health: m.Health | None) -> None:
    body = body_of(health, "ok", None, 0)
    assert body.batch_invariant is None and body.backend is None
