"""A wheel, an editable install and the project's root provide the same modules, and nothing else."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.version import VERSION
from tools.check_imports import imports_of

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 120
LINKED = ("config", "kernels", "shm", "stages")

LOOK_AROUND = """
import importlib.util, pathlib
import pipeline.stages.schedule.policies.policy, pipeline.kernels, pipeline.shm.arena, pipeline.config.load
print(pathlib.Path(pipeline.__file__).parent)
print([name for name in ("config", "kernels", "shm", "stages", "tests", "tools") if importlib.util.find_spec(name)])
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a fresh clone has it: builds leave files behind, which do not belong in the real one."""
    project = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("pipeline", *LINKED, "tests", "tools"):
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return project


@pytest.fixture(scope="module")
def wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, project, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder: Path, *what: str | Path) -> Path:
    """A virtual environment with one package and access to this environment's dependencies. Returns its bin."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    bin_dir = folder / "bin"
    # A line of a .pth file adds that folder to the path, but .pth files in it are not read: an editable install of this
    # project there stays invisible.
    site = run(bin_dir / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", bin_dir / "python", "install", "--quiet", "--no-compile")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=folder)
    return bin_dir


def assert_works(bin_dir: Path, elsewhere: Path, package: Path | str) -> None:
    """Check an install from a folder that is not the project's and contains a config.py of its own."""
    (elsewhere / "config.py").write_text("raise ImportError('the wrong config')")
    lines = run(bin_dir / "python", "-P", "-c", LOOK_AROUND, cwd=elsewhere).splitlines()
    assert lines == [str(package), "[]"]
    assert run(bin_dir / "pipeline", "--version", cwd=elsewhere) == f"pipeline {VERSION}\n"
    shown = tomllib.loads(run(bin_dir / "pipeline", "config", "show", "--config", "throughput", cwd=elsewhere))
    assert shown["schedule"]["max_num_seqs"] == 256
    assert run(bin_dir / "python", "-m", "pipeline", "--version", cwd=elsewhere) == f"pipeline {VERSION}\n"


def test_a_wheel_installs_and_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bin_dir = environment(tmp_path, wheel)
    site = run(bin_dir / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    assert_works(bin_dir, elsewhere, Path(site) / "pipeline")


def test_an_editable_install_provides_only_the_package(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bin_dir = environment(tmp_path, "--editable", project)
    assert_works(bin_dir, elsewhere, project / "pipeline")
    (elsewhere / "pipeline").symlink_to(project)
    (elsewhere / "script.py").write_text("from pipeline import LLM")
    run(bin_dir / "python", "-P", "script.py", cwd=elsewhere)  # as docs/python.md says of a script beside the clone


def test_the_project_runs_from_its_root_without_an_install(project: Path) -> None:
    code = "import sys; sys.path.insert(0, ''); from pipeline.__main__ import main; sys.exit(main(['--version']))"
    assert run(sys.executable, "-P", "-c", code, cwd=project) == f"pipeline {VERSION}\n"


def test_a_wheel_contains_every_file_of_the_folders_and_no_other(wheel: Path, project: Path) -> None:
    expected = {
        f"pipeline/{path.relative_to(project)}"
        for folder in LINKED
        for path in (project / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected |= {
        str(path.relative_to(project))
        for path in (project / "pipeline").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.relative_to(project).parts[1] not in LINKED
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


def requirements(*extras: str) -> list[Requirement]:
    """The requirements in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    return [Requirement(text) for text in texts]


def test_constraints_pin_every_dependency_exactly() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            (specifier,) = pin.specifier
            assert specifier.operator == "==", line
            assert "+" not in specifier.version, f"{line}: local version suffixes are not available everywhere"
            pins[canonicalize_name(pin.name)] = specifier.version
    for requirement in requirements("dev", "ray", "torch"):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"constraints.txt pins {requirement.name}=={version}"
    assert pins[canonicalize_name("torch")] == "2.13.0"


ELSEWHERE = (
    ROOT / "tests" / "e2e" / "client" / "clients",
    ROOT / "tools" / "compare_dinov2" / "reference.py",
    ROOT / "tools" / "compare_encoders" / "offline.py",
    ROOT / "tools" / "compare_encoders" / "fastembed_server.py",
    ROOT / "tools" / "compare_peers" / "openvino_server.py",
)
"""These run in environments of their own."""
BY_HAND = {
    "peft": ROOT / "tools" / "models" / "make_peft_reference.py",
    "sentencepiece": ROOT / "tests" / "stages" / "prepare" / "older_tokenizers" / "folders.py",
}
"""Packages that only what tests compare with needs: a tool that is run by hand, and a process that installs its own."""


@pytest.mark.parametrize(
    ("folders", "extras"),
    [(("pipeline", *LINKED), ("cuda", "media", "otel", "ray")), (("tests", "tools"), ("dev", "cuda", "ray"))],
    ids=["package", "tests"],
)
def test_every_import_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements(*extras)}
    providers = packages_distributions()
    undeclared = {}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if not {path, *path.parents}.isdisjoint(ELSEWHERE):
                continue  # they run in an environment of their own
            for found in imports_of(path.read_bytes(), "pipeline"):
                name = found.target.partition(".")[0]
                if name in sys.stdlib_module_names or name in ("pipeline", "tests", "tools"):
                    continue
                if BY_HAND.get(name) == path:
                    continue
                if not declared & {canonicalize_name(provider) for provider in providers.get(name, ())}:
                    undeclared[name] = f"{path.relative_to(ROOT)}:{found.line}"
    assert undeclared == {}
