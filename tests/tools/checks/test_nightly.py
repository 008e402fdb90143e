"""tools/nightly: each of its commands exists, and it goes on after one that fails."""

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("nightly", str(ROOT / "tools" / "nightly"))
    spec = importlib.util.spec_from_loader("nightly", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # it would be written beside the script
        loader.exec_module(module)
    return module


NIGHTLY: Any = load()


@pytest.mark.parametrize("one", NIGHTLY.COMMANDS, ids=lambda one: one.name)
def test_each_command_exists(one: Any) -> None:
    """Its program, its files, its environment variables and its options."""
    environ, words = NIGHTLY.parsed(one.line)
    assert one.minutes > 0 and re.fullmatch("[a-z0-9-]{1,14}", one.name)
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for name in environ:
        assert any(name in source for source in sources), f"no test reads {name}"
    assert words[0] == NIGHTLY.PYTHON
    if words[1] == "-m":
        program = words[2]
        if program == "pytest":
            source = "-q"
        else:
            target = ROOT / program.replace(".", "/")
            path = target / "__main__.py" if target.is_dir() else target.with_suffix(".py")
            source = (
                "".join(one.read_text("utf-8") for one in path.parent.glob("*.py"))
                if target.is_dir()
                else path.read_text("utf-8")
            )
    else:
        path = ROOT / words[1]
        assert path.exists(), words[1]
        files = list(path.rglob("*.py")) if path.is_dir() else [path, *path.parent.glob("cases.py")]
        source = "".join(one.read_text("utf-8") for one in files)
    for word in words[2:]:
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
        elif word.startswith("--") and word != "--":
            assert f'"{word}"' in source, f"{word} is no option of {words[1:3]}"


def test_names_are_unique_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    names = [one.name for one in NIGHTLY.COMMANDS]
    assert len(set(names)) == len(names)
    assert NIGHTLY.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names


def test_it_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commands = (
        NIGHTLY.Command("bad", "python -c 'import sys; print(1); sys.exit(3)'", 1),
        NIGHTLY.Command("slow", "python -c 'import time; time.sleep(60)'", 0.005),
        NIGHTLY.Command("good", "A=5 python -c 'import os; print(os.environ[\"A\"])'", 1),
        NIGHTLY.Command("other", "python -c 'raise SystemExit(9)'", 1),
    )
    monkeypatch.setattr(NIGHTLY, "COMMANDS", commands)
    assert NIGHTLY.main(["--out", str(tmp_path), "--skip", "other"]) == 1
    table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert [re.split(r"  +", line)[:2] for line in table] == [
        ["bad", "FAILED (3)"],
        ["slow", "TOOK TOO LONG"],
        ["good", "ok"],
    ]
    assert (tmp_path / "bad.txt").read_text() == "1\n" and (tmp_path / "good.txt").read_text() == "5\n"
    assert NIGHTLY.main(["--out", str(tmp_path), "good"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_an_unknown_name_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "tools/nightly", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "no such command: nothing; there are all-cases" in done.stderr
