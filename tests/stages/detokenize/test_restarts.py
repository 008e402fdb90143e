"""What the stage forgets and keeps when a neighbour's process is replaced."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.transport.outbox import Outbox
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import FACTS, receive_until_closed, send, settled
from tests.stages.detokenize.vocabularies import byte_level, save


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    save(byte_level(), tmp_path)
    with Rig("detokenize", Settings(gateway=GatewaySettings(replicas=2)), tmp_path) as rig:
        rig.start(FACTS)
        yield rig


def refuse_sends(monkeypatch: pytest.MonkeyPatch, *kinds: type) -> None:
    """Let all edges refuse messages of these types, as if they were full."""
    really = Outbox.send
    monkeypatch.setattr(
        Outbox, "send", lambda outbox, message: not isinstance(message, kinds) and really(outbox, message)
    )


def test_a_new_schedule_finds_no_sequence_of_the_one_before(rig: Rig) -> None:
    send(rig, opening(1))
    send(rig, settled([(1, 0, ids_of("lost"), m.Finish.NONE)]))
    rig.receive("gateway", m.Deltas)
    rig.restart("schedule.0")
    assert rig.load() == m.PlainLoad(0)
    send(rig, opening(1))  # schedule counts its sequences from the beginning
    send(rig, settled([(1, 0, ids_of("new"), m.Finish.LENGTH)]))
    assert receive_until_closed(rig, 1).text[1] == "new"


def test_what_a_dead_schedule_has_still_to_say_is_dropped(rig: Rig) -> None:
    send(rig, opening(1))
    rig.until(lambda load: load.num_open == 1)
    rig.restart("schedule.0")
    rig.send(settled([(1, 0, ids_of("late"), m.Finish.LENGTH)]), "schedule.0", incarnation=1)
    send(rig, opening(2))
    send(rig, settled([(2, 0, ids_of("new"), m.Finish.LENGTH)]))
    assert rig.receive("gateway", m.Deltas).texts == ["new"]
    assert rig.nothing("gateway")


def test_output_and_aborts_of_a_dead_schedule_that_were_not_sent_are_dropped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_sends(patch, m.Deltas, m.Abort)
        send(rig, opening(1, m.GenerationOptions(stop=["."])))
        send(rig, settled([(1, 0, ids_of("lost."), m.Finish.NONE)]))
        rig.load()
        rig.restart("schedule.0")
    rig.load()
    assert rig.nothing("gateway")
    assert rig.nothing("schedule")


def test_a_new_gateway_gets_no_output_of_before_but_the_other_one_gets_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_sends(patch, m.Deltas, m.Rejected)
        for gateway in (0, 1):
            send(rig, opening(gateway, gateway=gateway))
            send(rig, settled([(gateway, 0, ids_of("ab"), m.Finish.NONE)]))
            send(rig, m.Reject(77, 1, gateway, m.Failure(503, "full")))
        rig.load()
        rig.restart("gateway.1")
    assert rig.receive("gateway", m.Deltas).texts == ["ab"]
    assert isinstance(rig.receive("gateway"), m.Rejected)
    rig.load()
    assert rig.nothing("gateway.1")
    send(rig, settled([(seq, 2, [], m.Finish.ABORT) for seq in (0, 1)]))
    closing = rig.receive("gateway.1", m.Deltas)
    assert (closing.texts, closing.id_offsets, closing.finishes) == ([""], [2], [m.Finish.ABORT])
    rig.until(lambda load: load.num_open == 0)
