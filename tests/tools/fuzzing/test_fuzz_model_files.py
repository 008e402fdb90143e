"""tools/fuzzing/fuzz_model_files.py: a bounded slice of it, and that it finds a planted fault."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzzing import models, mutations

ROOT = Path(__file__).resolve().parents[3]
CASES = 40


def test_mutated_model_files_give_a_model_or_an_error_of_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/fuzzing/fuzz_model_files.py",
        "--cases",
        str(CASES),
        "--out",
        str(tmp_path / "failures"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"done, {CASES} cases: ") and last.endswith(" 0 failed")
    assert " 0 accepted" not in last and " 0 refused" not in last
    assert not (tmp_path / "failures").exists()


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
