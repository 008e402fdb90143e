"""What clients do with their requests gets a few log lines a second, however many requests and prompts these have."""

import logging
from collections.abc import Callable

import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.log.limited_log import MAX_LINES
from tests.stages.gateway.gate import COMPLETION, Gate

NUM = 5 * MAX_LINES
BODY = COMPLETION | {"prompt": ["Hi"] * NUM, "max_tokens": 2}


def leave(gate: Gate) -> None:
    with gate.raw(BODY, "/v1/completions"):
        for _ in range(NUM):
            gate.begin()
    for _ in range(NUM):
        gate.rig.receive("schedule", m.Abort)


def time_out(gate: Gate) -> None:
    reply = gate.complete(BODY | {"timeout_s": 0.05})
    for _ in range(NUM):
        gate.begin()
    assert reply.result().status_code == 504


def abort(gate: Gate) -> None:
    reply = gate.complete(BODY | {"timeout_s": 1.0})
    submits = [gate.begin() for _ in range(NUM)]
    gate.delta(submits[0], "a")
    for submit in submits:
        assert gate.rig.receive("schedule", m.Abort)
        gate.finish(submit, finish=m.Finish.ABORT)
    assert reply.result().status_code == 200


def be_rejected(gate: Gate) -> None:
    replies = [gate.complete(COMPLETION) for _ in range(NUM)]
    for _ in range(NUM):
        gate.reject(gate.submit(), m.Failure(400, "too long"))
    assert {reply.result().status_code for reply in replies} == {400}


def fail(gate: Gate) -> None:
    replies = [gate.complete(COMPLETION) for _ in range(NUM)]
    for _ in range(NUM):
        gate.delta(gate.begin(), num_ids=0, finish=m.Finish.ERROR, error="NaN")
    assert {reply.result().status_code for reply in replies} == {500}


@pytest.mark.parametrize(
    ("flood", "message"),
    [(leave, "aborted"), (time_out, "timed out"), (abort, "aborted"), (be_rejected, "rejected"), (fail, "failed")],
)
def test_lines_of_a_kind_are_limited(
    gate: Gate, caplog: pytest.LogCaptureFixture, flood: Callable[[Gate], None], message: str
) -> None:
    with caplog.at_level(logging.INFO, "pipeline"):
        flood(gate)
        gate.rig.load()
        nums = [1 for record in caplog.records if record.getMessage() == message]
        assert 0 < len(nums) <= 3 * MAX_LINES  # on a busy machine it takes more than a second
