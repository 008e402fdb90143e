"""What a gateway does when the number of ingests or gateways changes, and when it leaves itself."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import COMPLETION, Gate

SOME = 12
"""Requests, of which each of two ingests gets at least one, but once in two thousand times."""


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, max_open_sequences=32) as gate:
        yield gate


def test_a_new_ingest_gets_requests_only_when_it_is_used_and_another_one_those_that_it_leaves(gate: Gate) -> None:
    gate.rig.add("ingest.1")
    responses = [gate.complete(COMPLETION) for _ in range(SOME)]
    before = [gate.submit() for _ in range(SOME)]
    assert gate.rig.nothing("ingest.1")
    gate.rig.rescale("ingest", 2)
    responses += [gate.complete(COMPLETION) for _ in range(SOME)]
    gate.rig.until(lambda load: load.num_open_requests == 2 * SOME)
    first: list[m.Submit] = []
    second: list[m.Submit] = []
    for name, submits in (("ingest", first), ("ingest.1", second)):
        while not gate.rig.nothing(name):
            submits.append(gate.rig.receive(name, m.Submit))
    assert len(first) + len(second) == SOME and first and second
    gate.accept(second[0])
    gate.delta(second[0], "fine", finish=m.Finish.LENGTH)
    gate.rig.load()
    gate.rig.rescale("ingest", 1)
    gate.rig.remove("ingest.1")
    again = [gate.submit() for _ in second[1:]]
    assert {(one.request_id, one.attempt) for one in again} == {(one.request_id, 2) for one in second[1:]}
    assert gate.rig.nothing("ingest"), "the others are not submitted again"
    for submit in (*before, *first, *again):
        gate.accept(submit)
        gate.delta(submit, "fine", finish=m.Finish.LENGTH)
    assert [one.result().json()["choices"][0]["text"] for one in responses] == ["fine"] * 2 * SOME


def test_a_gateway_answers_when_no_more_is_open_than_its_share(tmp_path: Path) -> None:
    with Gate(tmp_path, max_open_sequences=4) as gate:
        responses = [gate.complete(COMPLETION) for _ in range(3)]
        submits = [gate.begin() for _ in responses]
        gate.rig.send(m.Rescaled(7, "gateway", 2))
        gate.rig.load()
        with pytest.raises(TimeoutError):
            gate.rig.receive("supervisor", m.Reconnected, timeout_s=0.05)
        refused = gate.complete(COMPLETION).result()
        assert refused.status_code == 503 and "limit of 2 open sequences is reached" in refused.text
        gate.delta(submits[0], "fine", finish=m.Finish.LENGTH)
        assert {one.result().status_code for one in wait(responses, 30, FIRST_COMPLETED).done} == {200}
        gate.rig.load()
        assert gate.rig.receive("supervisor", m.Reconnected) == m.Reconnected(7)
        gate.rig.rescale("gateway", 1)
        last = gate.complete(COMPLETION)
        for submit in (*submits[1:], gate.begin()):
            gate.delta(submit, "fine", finish=m.Finish.LENGTH)
        assert last.result().status_code == 200, "it has its old share again"


def test_a_gateway_that_leaves_serves_what_still_comes_and_closes_its_connections(gate: Gate) -> None:
    first = gate.complete(COMPLETION)
    submit = gate.begin()
    gate.rig.send(m.Drain(30.0, is_leaving=True))
    gate.rig.load()
    late = gate.complete(COMPLETION)
    late_submit = gate.begin()
    for one in (submit, late_submit):
        gate.delta(one, "fine", finish=m.Finish.LENGTH)
    for response in (first, late):
        assert response.result().status_code == 200 and response.result().headers["Connection"] == "close"
    gate.rig.receive("supervisor", m.Drained)


def test_a_gateway_that_leaves_fails_what_does_not_end_in_time(gate: Gate) -> None:
    response = gate.complete(COMPLETION)
    gate.begin()
    gate.rig.send(m.Drain(0.05, is_leaving=True))
    error = response.result().json()["error"]
    assert error["code"] == "shutting_down" and "gateway.replicas was lowered" in error["message"]
