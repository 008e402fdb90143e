"""The resources that a process uses, as the kernel counts them."""

import os
import subprocess
import sys

import pytest

from pipeline.runtime.process.process_usage import NOTHING, usage_of

BUSY = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); hold = bytes(64 * 2**20)\n"
BUSY += "while time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True)\ntime.sleep(600)"


def test_memory_cpu_time_and_threads_of_a_process_are_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            cpu_s = float(process.stdout.readline())
            usage = usage_of(process.pid)
        finally:
            process.kill()
    assert usage.rss_bytes > 4 * 2**20
    assert usage.cpu_s == pytest.approx(cpu_s, abs=0.2) and usage.cpu_s > 0
    assert usage.num_threads == 2


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert usage_of(process.pid) == NOTHING
    assert usage_of(os.getpid()) != NOTHING
