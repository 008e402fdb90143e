"""Kernels are compiled ahead of their first launch."""

import json
import os
import subprocess
import sys


def test_kernels_are_compiled_in_threads_and_not_launched() -> None:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_ahead"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"ahead": 2, "launched_ahead": 0, "later": [], "launched": ["_copy"] * 4}
