"""A thousand streams, of which fifty read a byte a second: the rest has its text as if they were not there."""

import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.gateway.http import descriptors
from tests.stages.gateway.crowd import open_gate, serve_crowd

NUM_STREAMS, NUM_SLOW = 1000, 50
NUM_STEPS, NUM_CHARS = 40, 2500
"""100 kB a stream: more than the kernel holds for a slow client here."""
MB = 1024**2


def test_slow_clients_cost_the_others_nothing_and_leave_nothing(tmp_path: Path) -> None:
    descriptors.raise_limit(2 * NUM_STREAMS, logging.getLogger("test"))
    with open_gate(tmp_path) as gate:
        alone = serve_crowd(gate, NUM_STREAMS, 0, NUM_STEPS, NUM_CHARS)
        beside = serve_crowd(gate, NUM_STREAMS, NUM_SLOW, NUM_STEPS, NUM_CHARS)
    assert (alone.num_behind, beside.num_behind) == (0, NUM_SLOW), "the slow ones were not slow, so this shows nothing"
    assert len(beside.fast_s) == NUM_STREAMS - NUM_SLOW
    assert beside.fast_s[-1] < 3 * alone.fast_s[-1] + 1.0
    # What waits for them is their text, once.
    assert beside.rss_bytes - alone.rss_bytes < 2 * NUM_SLOW * NUM_STEPS * NUM_CHARS + 32 * MB
    assert beside.num_fds == alone.num_fds


class TestTheLimitOfOpenFiles:
    @pytest.fixture
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """The limit, soft and hard, as a list that the test may fill and that grows where it is set."""
        limits: list[tuple[int, int]] = []

        def set_limit(what: int, value: tuple[int, int]) -> None:
            if value[0] > 2**20:
                raise ValueError("not allowed to raise maximum limit")
            limits.append(value)

        monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        return limits

    def test_is_raised_as_far_as_it_may_be(self, limits: Any, caplog: pytest.LogCaptureFixture) -> None:
        limits.append((1024, 65536))
        assert descriptors.raise_limit(1024, logging.getLogger("test")) == 65536
        assert limits[-1] == (65536, 65536)
        assert caplog.records == []

    @pytest.mark.parametrize("hard", [1024, 2**21])
    def test_that_is_too_low_is_said(self, limits: Any, caplog: pytest.LogCaptureFixture, hard: int) -> None:
        limits.append((1024, hard))
        assert descriptors.raise_limit(1024, logging.getLogger("test")) == 1024
        assert "gateway.max_open_sequences" in caplog.records[-1].message
        assert caplog.records[-1].levelname == "WARNING"
        assert caplog.records[-1].fields["limit"] == 1024  # type: ignore[attr-defined]
