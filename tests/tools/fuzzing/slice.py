"""Runs a slice of a fuzzer's cases."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def expect_no_failures(tool: str, cases: int, failures: Path) -> None:
    """Run tools/fuzzing/TOOL.py, and check that it accepts some cases, refuses others, and finds no failure."""
    command = [sys.executable, f"tools/fuzzing/{tool}.py", "--cases", str(cases), "--out", str(failures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"done, {cases} cases: ") and last.endswith(" 0 failed")
    assert " 0 accepted" not in last and " 0 refused" not in last
    assert not failures.exists()
