"""Messages that a full edge to a stage refuses are sent later, in order."""

from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.transport.outbox import Outbox
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.peers import until


def test_closed_is_never_sent_before_the_abort(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that gets `Closed` first has forgotten the request, and would leak the state that the abort creates."""
    is_full = True
    num_refused = 0
    send = Outbox.send

    def refuse_aborts(self: Any, message: Any) -> bool:
        nonlocal num_refused
        if is_full and isinstance(message, m.Abort):
            num_refused += 1
            return False
        return send(self, message)

    monkeypatch.setattr(Outbox, "send", refuse_aborts)
    connection = gate.raw(CHAT | {"stream": True})
    submit = gate.begin()
    connection.close()
    until(lambda: num_refused, "the gateway aborts the disconnected request")
    gate.finish(submit, finish=m.Finish.ABORT)
    gate.rig.until(lambda load: load.num_open_requests == 0)
    assert gate.rig.nothing("schedule"), "the abort is pending, and `Closed` behind it"
    is_full = False
    gate.rig.load()  # the gateway wakes and retries
    assert [type(gate.rig.receive("schedule")) for _ in range(2)] == [m.Abort, m.Closed]
    assert gate.rig.receive("ingest", m.Abort).request_id == submit.request_id
