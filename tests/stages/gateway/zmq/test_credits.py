"""How many deltas a client may be sent at once is bounded, whatever it grants."""

from pathlib import Path

import pytest

from pipeline.client import protocol as p
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer

MOST = 4


@pytest.mark.parametrize("granted", ["with the request", "by messages"])
def test_credits_beyond_the_bound_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: str
) -> None:
    monkeypatch.setattr(p, "MAX_CREDITS", MOST)
    with Gate(tmp_path) as gate, RawPeer(gate) as peer:
        assert peer.welcome.max_credits == MOST
        peer.generate(num_credits=100 if granted == "with the request" else 1)
        if granted == "by messages":
            for _ in range(3):
                peer.say(p.Credit(1, 100))
        submit = gate.begin()
        peer.hear(p.Accepted)
        assert peer.is_still_served(), "what was granted has been counted"
        for _ in range(MOST):
            gate.delta(submit, "a")
            assert peer.hear(p.Delta).outputs[0].text == "a"
        for text in ("b", "c", "d"):
            gate.delta(submit, text)
            gate.rig.load()
            assert peer.hears_nothing()
        peer.say(p.Credit(1, 100))
        assert peer.hear(p.Delta).outputs[0].text == "bcd", "it waited, and was merged"
        gate.finish(submit)
        peer.hear(p.Delta)
        peer.hear(p.Finished)
