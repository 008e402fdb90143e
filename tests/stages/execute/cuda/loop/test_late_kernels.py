"""No request waits for a kernel to be compiled: what any step launches was compiled before the server was ready."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.stages.execute.cuda.late_kernels import CASES


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    """By case. One process counts all, because each imports torch and Triton."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.stages.execute.cuda.late_kernels"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_all_kernels_are_compiled_before_the_first_request(case: str, counted: dict[str, dict[str, Any]]) -> None:
    found = counted[case]
    assert found["before"] > 40
    assert not found["late"], "steps with requests launch other kernels"
    assert not found["late_in_shapes"], "steps of other sizes launch other kernels"
