"""A thousand streams, of which fifty read a byte a second: the others are not slowed down."""

import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from pipeline.http_server.sockets import descriptors
from tests.stages.gateway.crowd import open_gate, serve_crowd

NUM_STREAMS, NUM_SLOW = 1000, 50
NUM_STEPS, NUM_CHARS = 40, 2500
"""100 kB per stream: more than the kernel buffers for a slow client here."""
MB = 1024**2


def test_slow_clients_do_not_delay_others_and_leak_nothing(tmp_path: Path) -> None:
    descriptors.raise_limit(2 * NUM_STREAMS, logging.getLogger("test"))
    with open_gate(tmp_path) as gate:
        alone = serve_crowd(gate, NUM_STREAMS, 0, NUM_STEPS, NUM_CHARS)
        beside = serve_crowd(gate, NUM_STREAMS, NUM_SLOW, NUM_STEPS, NUM_CHARS)
    assert (alone.num_behind, beside.num_behind) == (0, NUM_SLOW), (
        "the slow clients were not slow, so the test proves nothing"
    )
    assert len(beside.fast_s) == NUM_STREAMS - NUM_SLOW
    assert beside.fast_s[-1] < 3 * alone.fast_s[-1] + 1.0
    # Their pending text is stored once.
    assert beside.rss_bytes - alone.rss_bytes < 2 * NUM_SLOW * NUM_STEPS * NUM_CHARS + 32 * MB
    assert beside.num_fds == alone.num_fds


class TestLimitOfOpenFiles:
    @pytest.fixture
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """The limits, soft and hard: the test sets the first, and each change is appended."""
        limits: list[tuple[int, int]] = []

        def set_limit(what: int, value: tuple[int, int]) -> None:
            if value[0] > 2**20:
                raise ValueError("not allowed to raise maximum limit")
            limits.append(value)

        monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        return limits

    def test_the_limit_is_raised_to_the_hard_limit(self, limits: Any, caplog: pytest.LogCaptureFixture) -> None:
        limits.append((1024, 65536))
        assert descriptors.raise_limit(1024, logging.getLogger("test")) == 65536
        assert limits[-1] == (65536, 65536)
        assert caplog.records == []

    @pytest.mark.parametrize("hard", [1024, 2**21])
    def test_a_low_limit_is_logged(self, limits: Any, caplog: pytest.LogCaptureFixture, hard: int) -> None:
        limits.append((1024, hard))
        assert descriptors.raise_limit(1024, logging.getLogger("test")) == 1024
        assert "gateway.max_open_sequences" in caplog.records[-1].message
        assert caplog.records[-1].levelname == "WARNING"
        assert caplog.records[-1].fields["limit"] == 1024  # type: ignore[attr-defined]
