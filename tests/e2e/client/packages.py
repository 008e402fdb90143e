"""Third-party client packages for tests: each set is installed separately, at pinned versions.

The project's environment can't hold them all: two need an older `openai` than the tested one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeline-tests"
    folder = cache / f"{requirements.parent.name}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        run([sys.executable, "-m", "venv", "--without-pip", str(made)], cache, INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(made / "bin" / "python")]
        run(
            [*pip, "install", "--quiet", "--no-deps", "--no-compile", "-r", str(requirements.resolve())],
            cache,
            INSTALL_S,
        )
        shutil.rmtree(folder, ignore_errors=True)  # its Python was removed
        made.rename(folder)
    return python


def node_with(source: Path, folder: Path) -> Path:
    """A copy of `source` at `folder` with the packages of its lock file. Prebuilt packages only: nothing is compiled
    and no install script runs."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    assert not missing, (
        f"{' and '.join(missing)} not found: install Node.js 20 or newer with npm (https://nodejs.org); "
        "the tests of JavaScript clients need it, and npm fetches their packages from its registry"
    )
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules"))
    run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"], folder, INSTALL_S)
    return folder
