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

NAN_LOSES = {
    # An exponential or a sum of the same numbers is NaN anyway, so that the row fails.
    **dict.fromkeys(
        ("_decode_kernel", "_attend_kernel", "_rotary_kernel", "_route"), "other numbers of the row keep it"
    ),
    **dict.fromkeys(("_blocks", "_best_block", "_filter"), "a logit that is NaN is not chosen"),
    **dict.fromkeys(("_block_stats", "_top_logprobs", "_given_logprobs", "_token_logprobs"), "logprobs are finite"),
}
"""Kernels in which the larger or smaller of two floats may be one when the other is NaN, and why."""

NAMES = sorted(path.stem for path in (Path(__file__).parent.parent / "variants").glob("[!_]*.py"))


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


def test_no_maximum_loses_nan(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """NumPy's maximum keeps NaN, and so does the interpreter; that of a GPU needs `propagate_nan`."""
    extremes = defaultdict(set)
    for one in (one for each in compiled.values() for one in each):
        extremes[one["name"]].update(one["extremes"])
    assert extremes["_activate"] == {"max.NaN.f32"}, "of relu and relu2"
    assert extremes["_experts"] == {"max.NaN.f32", "min.NaN.f32"}, "of gpt-oss's limits"
    losing = {name for name, found in extremes.items() if any(".NaN." not in one for one in found)}
    assert losing == set(NAN_LOSES)
