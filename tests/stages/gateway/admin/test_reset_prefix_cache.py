"""POST /reset_prefix_cache"""

import socket
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin import reset_prefix_cache
from tests.stages.gateway.gate import Gate


def reset(gate: Gate) -> tuple[object, m.ResetPrefixCache]:
    response = gate.do(gate.client.post, "/reset_prefix_cache")
    question: m.ResetPrefixCache = gate.rig.receive("schedule", m.ResetPrefixCache)
    return response, question


def test_the_reply_is_sent_when_the_cache_is_reset(gate: Gate) -> None:
    responses, questions = zip(*(reset(gate) for _ in range(3)), strict=True)
    assert len({question.nonce for question in questions}) == 3
    assert not any(response.done() for response in responses)
    for index in (1, 0, 2):
        assert questions[index].gateway == 0
        gate.rig.send(m.PrefixCacheReset(0, questions[index].nonce, 10 + index), "detokenize.0")
    assert [response.result().json() for response in responses] == [{"num_blocks": 10 + index} for index in range(3)]


def test_a_missing_reply_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_prefix_cache, "TIMEOUT_S", 0.05)
    with Gate(tmp_path) as gate:
        response, question = reset(gate)
        result = response.result()  # type: ignore[attr-defined]
        assert (result.status_code, result.json()["error"]["code"]) == (503, "stage_unresponsive")
        gate.rig.send(m.PrefixCacheReset(0, question.nonce, 1), "detokenize.0")  # too late
        gate.rig.load()


def test_pending_resets_of_disconnected_clients_are_bounded(gate: Gate) -> None:
    nonces = []
    for _ in range(reset_prefix_cache.MAX_PENDING):
        with socket.create_connection(gate.address, timeout=30) as connection:
            connection.sendall(b"POST /reset_prefix_cache HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            nonces.append(gate.rig.receive("schedule", m.ResetPrefixCache).nonce)
    result = gate.client.post("/reset_prefix_cache")
    assert (result.status_code, result.json()["error"]["code"]) == (503, "overloaded")
    for nonce in nonces:
        gate.rig.send(m.PrefixCacheReset(0, nonce, 0), "detokenize.0")
    gate.rig.load()
    response, question = reset(gate)
    gate.rig.send(m.PrefixCacheReset(0, question.nonce, 0), "detokenize.0")
    assert response.result().json() == {"num_blocks": 0}  # type: ignore[attr-defined]


def test_a_reset_before_the_start_is_503(tmp_path: Path) -> None:
    with Gate(tmp_path, start=False) as gate:
        result = gate.client.post("/reset_prefix_cache")
        assert (result.status_code, result.json()["error"]["code"]) == (503, "starting")
        assert gate.rig.nothing("schedule", 0)
