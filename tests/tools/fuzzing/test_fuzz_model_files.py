"""tools/fuzzing/fuzz_model_files.py: a bounded slice of it, and that it finds a planted fault."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.fuzzing.slice import ROOT, expect_no_failures
from tools.fuzzing import models, mutations

CASES = 40


def test_mutated_model_files_give_a_model_or_an_error_of_one_line(tmp_path: Path) -> None:
    expect_no_failures("fuzz_model_files", CASES, tmp_path / "failures")


@pytest.mark.parametrize("number", range(4))
def test_a_case_depends_only_on_its_seed_and_changes_something(tmp_path: Path, number: int) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
        model = models.build(path)[number]
        before = content(model)
        mutations.spoil(model, random.Random(number), path / "outside")
        assert content(model) != before
    assert content(first) == content(second)


def content(path: Path) -> dict[str, bytes]:
    paths = [path] if path.is_file() else path.rglob("*")
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def test_a_case_that_ends_with_a_traceback_fails(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv += ['--cases', '2', '--out', 'failures']\n"
        "from tools.fuzzing import fuzz_model_files as fuzz\n"
        "real = fuzz.prepare\n"
        "fuzz.prepare = lambda settings: 1 / 0 if 'work' in settings.model else real(settings)\n"
        "sys.exit(fuzz.main())\n"
    )
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "case 1 of seed 0 failed: ended with code 1" in done.stdout and "ZeroDivisionError" in done.stdout
    assert (tmp_path / "failures" / "0-1" / "log").exists()
