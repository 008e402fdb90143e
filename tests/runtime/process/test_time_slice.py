"""Short slices, as the kernel has noted them."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.runtime.process.time_slice import SCHED_SETATTR, SHORT_S, SchedAttr, use_short_slices


def slice_s() -> float:
    """Of this thread; 0.0 where the kernel knows none."""
    found = SchedAttr()
    number = SCHED_SETATTR[os.uname().machine] + 1  # sched_getattr follows in every table of numbers
    assert not ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return float(found.runtime / 1e9)


def in_a_thread(work: Callable[[], float]) -> float:
    """One that starts here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_thread_and_those_that_it_starts_have_short_slices() -> None:
    usual_s, nice = slice_s(), os.getpriority(os.PRIO_PROCESS, 0)

    def inherited_s() -> float:
        use_short_slices()
        assert os.getpriority(os.PRIO_PROCESS, 0) == nice
        return in_a_thread(slice_s)

    assert in_a_thread(inherited_s) == pytest.approx(SHORT_S if usual_s else 0.0), "0: Linux before 6.12"
    assert slice_s() == usual_s
