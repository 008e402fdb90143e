"""Third-party client packages for tests: each set is installed separately, at pinned versions.

The project's environment can't hold them all: two need an older `openai` than the tested one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

INSTALL_S = 180.0


def run(command: list[str], folder: Path, timeout_s: float, environ: dict[str, str] | None = None) -> str:
    """Return a command's output. Raises with that output if the command fails."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False, env=environ
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_with(requirements: Path) -> Path:
    """The Python of a virtual environment with exactly these packages, all pinned, dependencies included. The
    environment is cached in the user's cache folder, keyed by the requirements and the Python."""
    made_of = f"{sys.version}{sys.base_prefix}".encode() + requirements.read_bytes()

    def make(folder: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent, INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
        run(
            [*pip, "install", "--quiet", "--no-deps", "--no-compile", "-r", str(requirements.resolve())],
            folder.parent,
            INSTALL_S,
        )

    return _cached(requirements.parent.name, made_of, Path("bin/python"), make) / "bin" / "python"


def node_with(source: Path, folder: Path) -> Path:
    """A copy of `source` at `folder` with the packages of its lock file. Prebuilt packages only: nothing is compiled
    and no install script runs. The packages are cached in the user's cache folder, keyed by the lock file."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    assert not missing, (
        f"{' and '.join(missing)} not found: install Node.js 20 or newer with npm (https://nodejs.org); "
        "the tests of JavaScript clients need it, and npm fetches their packages from its registry"
    )
    listed = [source / "package.json", source / "package-lock.json"]

    def make(made: Path) -> None:
        made.mkdir()
        for one in listed:
            shutil.copy2(one, made)
        run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"], made, INSTALL_S)

    made_of = b"".join(one.read_bytes() for one in listed)
    cached = _cached(f"{source.name}-node", made_of, Path("node_modules"), make)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(cached / "node_modules")
    return folder


def _cached(name: str, made_of: bytes, part: Path, make: Callable[[Path], None]) -> Path:
    """A folder in the user's cache that `make` has made. `part` is missing if it is incomplete."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeline-tests"
    folder = cache / f"{name}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    if (folder / part).exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        make(made)
        shutil.rmtree(folder, ignore_errors=True)  # its Python was removed
        made.rename(folder)
    return folder
