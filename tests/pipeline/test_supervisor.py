"""The supervisor's parts; its whole life is tested end to end."""

import os
import socket

import pytest

from pipeline import messages as m
from pipeline import topology
from pipeline.config.settings import Settings
from pipeline.health import HealthRound
from pipeline.supervisor import listen


class FakeChild:
    def __init__(self, name: str, state: str = "ready") -> None:
        self.name, self.state, self.pid = name, state, os.getpid()


LOAD = m.ScheduleLoad(1, 2, 3, 4, 5, 12)


def test_everybody_who_answers_is_ready_and_the_whole_is_ok() -> None:
    children = [FakeChild("schedule.0"), FakeChild("gateway.0")]
    round_ = HealthRound("gateway.0", nonce=7, timeout_s=5)
    round_.answered("schedule.0", m.Pong(1, LOAD))
    assert not round_.is_over(children)
    round_.answered("gateway.0", m.Pong(1, m.GatewayLoad(3)))
    assert round_.is_over(children)
    health = round_.result(children)
    assert (health.nonce, health.status, health.schedule) == (7, "ok", LOAD)
    assert all(stage.answer_ms >= 0 for stage in health.stages)


def test_who_does_not_answer_in_time_is_late() -> None:
    children = [FakeChild("schedule.0"), FakeChild("execute.0")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=0.0)
    round_.answered("schedule.0", m.Pong(1, LOAD))
    assert round_.is_over(children)
    health = round_.result(children)
    assert (health.status, [stage.state for stage in health.stages]) == ("late", ["ready", "late"])
    assert health.stages[1].answer_ms < 0


def test_who_is_still_starting_says_so() -> None:
    children = [FakeChild("execute.0", "starting")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=5)
    assert round_.result(children).status == "starting"


def test_a_taken_port_is_an_error_that_names_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: .* gateway.port"):
            listen("127.0.0.1", port)


def test_every_arrow_has_an_inbox_that_takes_it() -> None:
    names = {row.name for row in topology.TOPOLOGY}
    assert names == set(topology.FLOW)
    for row in topology.TOPOLOGY:
        assert set(row.sends_to) <= names
        for owner in row.reads:
            assert topology.row(owner).has_arena
            assert owner in row.sends_to, "who reads a segment must be able to release it"
            assert topology.arena_bytes(Settings(), owner) > 0


def test_a_host_that_is_not_here_is_an_error_that_names_the_key() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: .* gateway\.host"):
        listen("192.0.2.1", 0)


def test_the_whole_is_as_bad_as_its_worst_stage() -> None:
    children = [FakeChild("execute.0", "starting"), FakeChild("ingest.0"), FakeChild("schedule.0", "dead")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=60)
    round_.answered("execute.0", m.Pong(1, m.PlainLoad()))
    round_.answered("ingest.0", m.Pong(1, m.PlainLoad()))
    assert round_.is_over(children), "the dead are not waited for"
    assert round_.result(children).status == "dead"
