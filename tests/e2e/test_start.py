"""A warm start (model prepared, kernels compiled) is fast."""

import time

import pytest

from tests.e2e.server import Server

START_S = 5.0
"""Three times the duration on two idle cores; the first start, which compiles, takes longer."""
NUM_TRIES = 3


@pytest.mark.usefixtures("server")  # which has compiled the kernels, and is idle
def test_a_warm_start_takes_seconds() -> None:
    """The best of several: other load looks like a slow start, but rarely lasts through all of them."""
    took_s: list[float] = []
    while len(took_s) < NUM_TRIES and (not took_s or took_s[-1] >= START_S):
        begin_s = time.monotonic()
        with Server():
            took_s.append(time.monotonic() - begin_s)
    assert min(took_s) < START_S, took_s
