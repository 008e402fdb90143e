"""`make serve` where something is missing: one line that says what, before anything is installed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.guardian import guard

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = (
    "sh",
    "env",
    "touch",
    "rm",
    "df",
    "awk",
    "test",
    "echo",
    "true",
    "false",
    "kill",
    "ls",
    "grep",
    "xargs",
    "nproc",
)
NUM_PACKAGES, NUM_MODULES = 20, 100
COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the Makefile, and `bin`, which has the programs that are found, and a `python` that succeeds."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in NEEDED:
        if (path := shutil.which(name)) is not None:
            (bin_folder / name).symlink_to(path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    put(bin_folder / "c++", "exit 0")
    put(bin_folder / "python", "exit 0")
    return tmp_path


def put(path: Path, script: str) -> None:
    path.unlink(missing_ok=True)  # else it would be written through a link into the machine's own program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def environment(machine: Path, script: str) -> None:
    """A complete virtual environment, whose `python` runs the script."""
    (machine / ".venv/bin").mkdir(parents=True)
    put(machine / ".venv/bin/python", script)
    put(machine / ".venv/bin/pip", "exit 1")


def make(machine: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run `make serve`; the exit code and the lines that are not make's own."""
    program = shutil.which("make")
    assert program is not None
    done = subprocess.run(
        [program, "serve", "PYTHON=python", *arguments],
        cwd=machine,
        env={"PATH": str(machine / "bin"), "HOME": str(machine)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode, [line for line in lines if not line.startswith("make: ***")]


def test_an_older_python_is_named(machine: Path) -> None:
    put(machine / "bin/python", 'case "$*" in *version_info*) exit 1;; esac')
    assert make(machine) == (2, ["Python 3.11 or newer is needed; name one as in: make PYTHON=python3.12 serve"])


def test_a_python_without_venv_is_named(machine: Path) -> None:
    put(machine / "bin/python", 'case "$*" in *ensurepip*) exit 1;; esac')
    words = "Python can't make virtual environments here; on Debian and Ubuntu: apt install python3-venv"
    assert make(machine) == (2, [words])


def test_a_full_disk_is_named_before_anything_is_written(machine: Path) -> None:
    put(machine / "bin/df", "echo Filesystem 1048576-blocks Used Available; echo tmpfs 40 21 19")
    words = f".venv needs 300 MB, but only 19 MB are free in {machine}: free disk space"
    assert make(machine) == (2, [words])
    assert not (machine / ".venv").exists()


def test_a_missing_compiler_is_named_before_packages_are_fetched(machine: Path) -> None:
    (machine / "bin/c++").unlink()
    environment(machine, f"echo called >> {machine}/calls")
    words = "no C++ compiler, which computing on a CPU needs; on Debian and Ubuntu: apt install g++"
    assert make(machine) == (2, [words])
    assert not (machine / "calls").exists()


@pytest.mark.parametrize("name", COMPILERS)
def test_any_of_the_compilers_will_do(machine: Path, name: str) -> None:
    (machine / "bin/c++").rename(machine / "bin" / name)
    environment(machine, f"echo called >> {machine}/calls")
    put(machine / ".venv/bin/pipeline", "echo serving")
    code, lines = make(machine)
    assert (code, lines[-1]) == (0, "serving")
    assert (machine / "calls").exists()


def test_a_disk_that_pip_fills_is_named_with_what_to_do(machine: Path) -> None:
    environment(machine, 'case "$*" in *pip*) exit 1;; esac')
    put(machine / "bin/df", "echo Filesystem 1048576-blocks Used Available; echo tmpfs 40 40 0")
    code, lines = make(machine)
    assert code == 2
    assert lines[1:] == [
        f"only 0 MB are free in {machine}: free 300 MB of disk space",
        "only 0 MB are free in /tmp: free 300 MB of disk space",
        "not installed: pip says above why. The next make serve goes on from here",
    ]


def test_another_failure_of_pip_does_not_blame_the_disk(machine: Path) -> None:
    environment(machine, 'case "$*" in *pip*) exit 1;; esac')
    put(machine / "bin/df", "echo Filesystem 1048576-blocks Used Available; echo tmpfs 400 0 400")
    code, lines = make(machine)
    assert (code, lines[1:]) == (2, ["not installed: pip says above why. The next make serve goes on from here"])


def test_an_environment_whose_making_was_interrupted_is_made_again(machine: Path) -> None:
    environment(machine, "exit 1")
    (machine / ".venv/bin/pip").unlink()
    put(machine / "bin/mkdir", 'exec /bin/mkdir "$@"')
    put(machine / "bin/pipeline", "echo serving")
    made = "mkdir -p .venv/bin && for one in python pip pipeline; do"
    put(machine / "bin/python", f'case "$*" in *"-m venv"*) {made} cp {machine}/bin/true .venv/bin/$one; done;; esac')
    put(machine / "bin/cp", 'exec /bin/cp "$@"')
    assert make(machine)[0] == 0


@pytest.mark.parametrize(("arguments", "is_prepared"), [((), True), (("ARGS=--port 9000",), False)])
def test_the_default_model_is_prepared_while_kernels_compile(
    machine: Path, arguments: tuple[str, ...], is_prepared: bool
) -> None:
    environment(machine, f'echo "$*" >> {machine}/calls')
    put(machine / ".venv/bin/pipeline", f"cat {machine}/calls")
    (machine / "bin/cat").symlink_to("/bin/cat")
    code, lines = make(machine, *arguments)
    assert code == 0
    assert ("-m pipeline.cli.cache.ahead" in lines) == is_prepared


def test_ctrl_c_while_modules_compile_ends_it(machine: Path) -> None:
    packages = machine / ".venv/lib/python3/site-packages"
    environment(machine, f'case "$*" in *compileall*) exec {sys.executable} "$@";; esac')
    for number in range(NUM_PACKAGES):
        (packages / f"package{number}").mkdir(parents=True)
        for name in range(NUM_MODULES):
            (packages / f"package{number}" / f"module{name}.py").write_text("x = [1]\n" * 200)
    process = subprocess.Popen(
        [shutil.which("make") or "make", "serve", "PYTHON=python"],
        cwd=machine,
        env={"PATH": str(machine / "bin"), "HOME": str(machine)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    guard(process)
    end = time.monotonic() + 60
    while not any(packages.rglob("*.pyc")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert len(list(packages.rglob("*.pyc"))) < NUM_PACKAGES * NUM_MODULES
