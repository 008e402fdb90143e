"""Which signals end a server."""

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.supervisor.signals import TerminationSignals


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is handled as before when the test is over."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("before", "taken"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)])
def test_a_closed_terminal_ends_the_server_without_nohup(hangup: None, before: signal.Handlers, taken: int) -> None:
    signal.signal(signal.SIGHUP, before)
    signals = TerminationSignals()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.take() == taken
    finally:
        signals.close()
    assert signal.getsignal(signal.SIGHUP) == before
