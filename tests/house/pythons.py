"""The Pythons that the package supports, and those found on this machine."""

import functools
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY = "PIPELINE_TEST_PYTHONS"
"""Colon-separated interpreters of environments with the package's dependencies: the server is tested with each of
them, besides the interpreter of the tests."""
WHICH = "import sys; print('%d.%d' % sys.version_info[:2])"


def supported() -> list[str]:
    """The versions that pyproject.toml names, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    return ["3." + one.removeprefix(prefix) for one in project["classifiers"] if one.startswith(prefix)]


@functools.cache
def here() -> dict[str, str]:
    """Version → interpreter, of the supported versions on this machine: the running interpreter, those on the path by
    their versioned names, those of pyenv, and those that uv finds."""
    found = {}
    for version in supported():
        for path in (sys.executable, shutil.which(f"python{version}"), *_of_pyenv(version), _of_uv(version)):
            if path and _version_of(path) == version:
                found[version] = path
                break
    return found


def ready() -> list[str]:
    """Interpreters that have the package's dependencies."""
    return [sys.executable, *(path for path in os.environ.get(READY, "").split(":") if path)]


def _of_pyenv(version: str) -> list[str]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [str(path) for path in sorted(root.glob(f"versions/{version}*/bin/python"))]


def _of_uv(version: str) -> str | None:
    if (uv := shutil.which("uv")) is None:
        return None
    return _output(uv, "python", "find", "--no-python-downloads", "--system", version)


def _version_of(path: str) -> str | None:
    return _output(path, "-c", WHICH)


def _output(*command: str) -> str | None:
    """The output of a command that succeeds: a name on the path may be a broken shim."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
