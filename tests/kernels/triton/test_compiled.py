"""Every kernel compiles for a Hopper GPU and fits its resources; above all, no registers are spilled."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.pretending import MAX_SHARED_BYTES

NAMES = sorted(path.stem for path in (Path(__file__).parent / "variants").glob("[!_]*.py"))


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    """The kernels by the name of their launches. One process compiles all, because each imports torch and Triton."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for line in done.stdout.splitlines():
        one = json.loads(line)
        found[one["of"]].append(one)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_and_fit(name: str, compiled: dict[str, list[dict[str, Any]]]) -> None:
    assert compiled[name]
    for one in compiled[name]:
        assert one["stack_bytes"] == 0, one
        assert one["shared_bytes"] <= MAX_SHARED_BYTES, one
