"""torch is an extra: what needs it says in one line how to get it, before a model is downloaded."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from pipeline import torch_needed
from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.errors import UserError
from pipeline.stages.execute.cpu.backend import choose_library
from tests.stages.execute import checkpoints

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_it_is_an_extra_and_the_command_asks_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert not [one for one in project["dependencies"] if one.startswith(("torch", "triton"))]
    extras = project["optional-dependencies"]
    assert extras["torch"] == [torch_needed.REQUIREMENT] and torch_needed.REQUIREMENT in extras["cuda"]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"device": "cuda"}, "execute.device='cuda' needs PyTorch"),
        ({"kernels": "torch"}, "execute.kernels='torch' needs PyTorch"),
        ({"dtype": "float32"}, "execute.dtype='float32' needs PyTorch"),
    ],
)
def test_settings_that_need_it_name_themselves_and_the_command(changes: dict[str, str], what: str) -> None:
    problem = torch_needed.why_missing(Settings(execute=ExecuteSettings(**changes)))  # type: ignore[arg-type]
    assert problem is not None and "\n" not in problem
    assert problem.startswith(what) and f"{sys.executable} -m pip install 'torch>=2.11'" in problem
    assert (torch_needed.SMALLER in problem) == (changes != {"device": "cuda"})


@pytest.mark.usefixtures("without")
def test_the_defaults_do_without_it() -> None:
    assert torch_needed.why_missing(Settings()) is None


def test_where_it_is_installed_nothing_is_said() -> None:
    assert torch_needed.why_missing(Settings(execute=ExecuteSettings(kernels="torch"))) is None
    torch_needed.require("a test")


@pytest.mark.usefixtures("without")
def test_without_a_compiler_too_the_error_names_both_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"name another, or unset it; PyTorch could, several times slower, but is not"):
        choose_library(Settings(), checkpoints.config_of(**next(iter(checkpoints.VARIANTS.values()))))
