"""Every kernel compiles for a Hopper GPU and fits its resources; above all, no registers are spilled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.pretending import MAX_SHARED_BYTES

NAMES = sorted(path.stem for path in (Path(__file__).parent / "variants").glob("[!_]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_and_fit(name: str) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile", name]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert compiled
    for one in compiled:
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= MAX_SHARED_BYTES, one
