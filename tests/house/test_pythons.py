"""Python 3.11 to 3.13: the package as a wheel and as source, and served from a folder with shadowing modules.

A missing interpreter is skipped, and the end of the test run names it. Checks that need no interpreter run anyway:
the source has the oldest version's syntax, and imports nothing that a newer version has removed.
"""

import ast
import json
import re
import subprocess
import sys
import tarfile
import threading
import urllib.request
import warnings
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from pipeline.version import VERSION
from tests.guardian import guard
from tests.house import pythons
from tests.house.test_packaging import LINKED, PATIENCE_S, ROOT, project, run, wheel
from tools.check_imports import imports_of

__all__ = ["project", "wheel"]  # fixtures

SOURCES = [path for folder in ("pipeline", *LINKED) for path in sorted((ROOT / folder).rglob("*.py"))]
OLDEST = (3, 11)
REMOVED = {
    # in 3.12
    "asynchat", "asyncore", "distutils", "imp", "smtpd",
    # in 3.13
    "aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib",
    "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib",
}  # fmt: skip

SHADOWING = ("config.py", "shm.py", "stages.py", "kernels/__init__.py", "zmq.py", "msgspec.py", "json.py", "torch.py")


def test_the_oldest_supported_python_is_the_oldest_tested() -> None:
    assert pythons.supported() == ["3.11", "3.12", "3.13"]
    assert tuple(map(int, pythons.supported()[0].split("."))) == OLDEST
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_source_has_the_syntax_of_the_oldest_python() -> None:
    with warnings.catch_warnings(action="error"):  # an invalid escape is a warning now and an error later
        for path in SOURCES:
            ast.parse(path.read_bytes(), str(path), feature_version=OLDEST)


def test_nothing_is_imported_that_a_newer_python_has_removed() -> None:
    imports = {
        (found.target.partition(".")[0], f"{path.relative_to(ROOT)}:{found.line}")
        for path in SOURCES
        for found in imports_of(path.read_bytes(), "pipeline")
    }
    assert [index for name, index in imports if name in REMOVED] == []


LOOK_AT = """
import compileall, importlib.metadata as md, json, pathlib, sys
site = pathlib.Path(sys.argv[1])
assert compileall.compile_dir(str(site / "pipeline"), quiet=1, force=True)
found = md.distribution("pipeline-serve")
print(json.dumps([found.version, [p.value for p in found.entry_points if p.group == "console_scripts"]]))
"""


@pytest.mark.parametrize("version", pythons.here())
def test_a_wheel_installs_and_compiles_in_each_available_python(version: str, wheel: Path, tmp_path: Path) -> None:
    run(pythons.here()[version], "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    assert run(python, "-c", pythons.WHICH, cwd=tmp_path).strip() == version
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    )
    run(*pip, wheel, cwd=tmp_path)
    site = tmp_path / "venv" / "lib" / f"python{version}" / "site-packages"
    output = run(python, "-P", "-W", "error", "-c", LOOK_AT, site, cwd=tmp_path)
    assert json.loads(output) == [VERSION, ["pipeline.__main__:main"]]
    # The launcher exists, and imports the package first.
    assert "from pipeline.__main__ import main" in (tmp_path / "venv" / "bin" / "pipeline").read_text()


class TestAWheel:
    def test_needs_no_compiler_and_fits_every_machine(self, wheel: Path) -> None:
        assert wheel.name == f"pipeline_serve-{VERSION}-py3-none-any.whl"
        with zipfile.ZipFile(wheel) as file:
            (name,) = [name for name in file.namelist() if name.endswith(".dist-info/WHEEL")]
            assert b"Root-Is-Purelib: true" in file.read(name)

    def test_has_complete_metadata(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
            (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(file.read(name).decode())
        assert (metadata["Name"], metadata["Version"]) == ("pipeline-serve", VERSION)
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata["License-Expression"] == "Apache-2.0"
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        assert metadata["Description-Content-Type"] == "text/markdown"
        assert metadata.get_payload() == (ROOT / "README.md").read_text("utf-8")
        assert metadata.get_all("Project-URL") is None
        assert "Author" not in metadata and "Home-page" not in metadata

    def test_contains_type_marker_defaults_and_kernel_sources(self, wheel: Path) -> None:
        names = zipfile.ZipFile(wheel).namelist()
        assert "pipeline/py.typed" in names
        assert "pipeline/config/presets/default.toml" in names
        assert {"pipeline/kernels/cpu/program.cpp", "pipeline/kernels/cpu/linear.h"} <= set(names)


def test_a_source_distribution_makes_the_same_wheel(project: Path, wheel: Path, tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", build, tmp_path, cwd=project).splitlines()[-1]
    assert name == f"pipeline_serve-{VERSION}.tar.gz"
    with tarfile.open(tmp_path / name) as file:
        assert all(member.isfile() or member.isdir() for member in file), "a link could point outside"
        file.extractall(tmp_path, filter="data")
    source = tmp_path / name.removesuffix(".tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", tmp_path / "again", source, cwd=tmp_path)
    (again,) = (tmp_path / "again").glob("*.whl")

    def contents(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}

    assert contents(again) == contents(wheel)


@pytest.mark.usefixtures("smollm2_dir")
@pytest.mark.parametrize("python", pythons.ready())
def test_a_wheel_serves_from_a_folder_of_shadowing_modules(python: str, wheel: Path, tmp_path: Path) -> None:
    """With the dependencies of another environment, and the package only from the wheel."""
    run(python, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    bin_dir = tmp_path / "venv" / "bin"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site, dependencies = (Path(run(one, "-c", where, cwd=tmp_path).strip()) for one in (bin_dir / "python", python))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    pip = (sys.executable, "-m", "pip", "--python", bin_dir / "python", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--force-reinstall", wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    for name in SHADOWING:
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text("raise ImportError('the wrong one')")
    with subprocess.Popen(
        [bin_dir / "pipeline", "serve", "--set", "gateway.port=0", "--config", "small-memory"],
        cwd=elsewhere,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        guard(server)
        watchdog = threading.Timer(PATIENCE_S, server.kill)
        watchdog.start()
        try:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if match := re.search(r"ready on (http://\S+)", line):
                    break
            else:
                raise AssertionError("it did not start:\n" + "".join(lines))
            body = {"model": "SmolLM2-135M-Instruct", "prompt": "One, two, three,", "max_tokens": 2, "temperature": 0}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{match[1]}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                assert json.loads(response.read())["choices"][0]["text"] == " four,"
            server.terminate()
            rest = server.stderr.read()
            assert server.wait(PATIENCE_S) == 0, rest
        finally:
            watchdog.cancel()
            if server.poll() is None:
                server.kill()
    assert sorted(str(p.relative_to(elsewhere)) for p in elsewhere.rglob("*.py")) == sorted(SHADOWING)
