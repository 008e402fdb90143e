"""tests/pipes.py: a process that is left behind and holds the output of one that has ended fails the test, at once."""

import re
import subprocess
import sys
import threading

import psutil
import pytest

from tests.pipes import close_at_end

LEAVES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: time.sleep(1000)"], stdout=sys.stderr)
print(child.pid, flush=True)
"""


def read(text: str) -> "tuple[subprocess.Popen[str], threading.Thread]":
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    reader = threading.Thread(target=lambda: process.stderr and process.stderr.read(), daemon=True)
    reader.start()
    return process, reader


def test_it_is_killed_and_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pipes.WAIT_S", 1.0)
    process, reader = read(LEAVES)
    with process.stdout:  # type: ignore[union-attr]
        left = psutil.Process(int(process.stdout.readline()))  # type: ignore[union-attr]
    process.wait(60)
    with pytest.raises(AssertionError, match=rf"(?s)left behind.*\n{left.pid} .*time\.sleep") as raised:
        close_at_end(reader, process.stderr)
    assert psutil.wait_procs([left], timeout=60)[0], "it is not killed"
    assert process.stderr is not None and process.stderr.closed and not reader.is_alive()
    assert re.search(rf"\n{left.pid} \w+ .*python", str(raised.value))


def test_without_one_the_output_is_closed() -> None:
    process, reader = read("import sys; print('bye', file=sys.stderr)")
    with process.stdout:  # type: ignore[union-attr]
        process.wait(60)
    close_at_end(reader, process.stderr)
    assert process.stderr is not None and process.stderr.closed
