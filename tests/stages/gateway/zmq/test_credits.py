"""Credits are bounded, however many a client grants."""

from pathlib import Path

import pytest

from pipeline.client import protocol as p
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer

MOST = 4


@pytest.mark.parametrize("granted", ["with the request", "by messages"])
def test_credits_above_the_maximum_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: str) -> None:
    monkeypatch.setattr(p, "MAX_CREDITS", MOST)
    with Gate(tmp_path) as gate, RawPeer(gate) as peer:
        assert peer.welcome.max_credits == MOST
        peer.generate(num_credits=100 if granted == "with the request" else 1)
        if granted == "by messages":
            for _ in range(3):
                peer.send(p.Credit(1, 100))
        submit = gate.begin()
        peer.receive(p.Accepted)
        assert peer.is_still_served(), "the credits have been counted"
        for _ in range(MOST):
            gate.delta(submit, "a")
            assert peer.receive(p.Delta).outputs[0].text == "a"
        for text in ("b", "c", "d"):
            gate.delta(submit, text)
            gate.rig.load()
            assert peer.receives_nothing()
        peer.send(p.Credit(1, 100))
        assert peer.receive(p.Delta).outputs[0].text == "bcd", "pending deltas are merged"
        gate.finish(submit)
        peer.receive(p.Delta)
        peer.receive(p.Finished)
