"""supervisor/restart/waiter.py: no signal is lost, whenever it comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.supervisor.restart import waiter

FIRST = """
import ctypes, os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, stderr=sys.stderr)
child.stdout.readline()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.kill(os.getpid(), signal.SIGTERM)  # it is pending when the waiter begins
os.execv(sys.executable, [sys.executable, "-I", "-S", sys.argv[1], str(child.pid)])
"""
CHILD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print(flush=True)
while True:
    signal.pause()
"""
PARENT_THAT_ENDS = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # without a word to its child
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print(flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("child", [CHILD, PARENT_THAT_ENDS], ids=["a child", "a child's child, whose parent ends"])
def test_a_signal_that_came_before_it_began_is_passed_on(child: str) -> None:
    command = [sys.executable, "-c", FIRST, str(Path(waiter.__file__)), child]
    with subprocess.Popen(command, process_group=0) as process:
        try:
            assert process.wait(60) == 7
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
