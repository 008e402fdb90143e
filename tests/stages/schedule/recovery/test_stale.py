"""Requests and results of processes that are gone are dropped."""

from pipeline.runtime import messages as m
from tests.fakes import expected
from tests.rig import Rig
from tests.stages.schedule.neighbours import FACTS, Neighbours


def test_a_request_that_kills_detokenize_does_not_go_to_its_successor() -> None:
    """The other one does, with all its output."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        for request_id in (1, 2):
            around.admit(request_id, [request_id, 3], max_tokens=8, n=2)
        for _ in range(3):
            around.step()
        rig.load()
        rig.send(m.FailRequests({1: f"detokenize died 3{m.DIED_OF_REQUEST}"}))
        rig.restart("detokenize.0")
        assert [rig.receive("detokenize", m.Open).request_id for _ in range(2)] == [2, 2]
        around.until_finished(2)
        assert [len(ids) for ids in around.received.values()] == [8, 8]
        assert not any(isinstance(message, m.Open) for message in rig._queues["detokenize"])


def test_a_request_of_a_gateway_that_has_died_is_dropped() -> None:
    """Ingest had sent it before it learned of the death. It would never be closed."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.restart("gateway.0")
        around.admit(1, list(range(2000)), gateway=1)
        around.admit(2, [1, 2], gateway=2)
        assert rig.receive("detokenize", m.Open).request_id == 2
        assert rig.receive("ingest", m.Release).offsets, "its ids are released"


def test_a_request_of_a_gateway_that_is_gone_is_dropped() -> None:
    """One that was removed has no successor with a higher number."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.send(m.PeerRestarted(1, m.PeerInbox("gateway.0", "", 0), 1, [], is_removed=True), "supervisor")
        assert rig.receive("supervisor", m.Reconnected) == m.Reconnected(1)  # messages of two neighbours have no order
        around.admit(1, list(range(2000)), gateway=1)
        around.admit(2, [1, 2], gateway=2)
        assert rig.receive("detokenize", m.Open).request_id == 2
        assert rig.receive("ingest", m.Release).offsets, "its ids are released"


def send_stale_result(rig: Rig) -> None:
    """A result of another scheduler's step, with an array in shared memory."""
    token_outputs = rig.arena("execute.0").put(bytes(5000), readers=("schedule.0",))
    rig.send(m.StepResult(99, 1, b"", b"", b"", b"", 0.0, 0.0, token_outputs=token_outputs), "execute.0")


def is_released(rig: Rig) -> bool:
    """Whether the executor's arena is empty after the next release."""
    release = rig.receive("execute", m.Release)
    arena = rig.arena("execute.0")
    for offset, generation in zip(release.offsets, release.generations, strict=True):
        arena.release(offset, generation, release.reader)
    return arena.num_live == 0


def test_a_result_of_another_incarnation_is_dropped() -> None:
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        send_stale_result(rig)
        assert is_released(rig)
        around.admit(1, [1, 2, 3], max_tokens=2)
        around.until_finished(1)
        assert around.received[1] == expected([1, 2, 3], m.GenerationOptions(), 0, 2)[0]


def test_a_result_that_arrives_before_start_is_dropped() -> None:
    """A restarted stage may find results for its predecessor's steps in the socket before the supervisor's Start."""
    with Rig("schedule") as rig:
        send_stale_result(rig)
        assert rig.load() == m.PlainLoad()
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=2)
        assert is_released(rig)
        around.until_finished(1)
        assert around.received[1] == expected([1, 2, 3], m.GenerationOptions(), 0, 2)[0]
