"""Models that tests may damage."""

import shutil
from pathlib import Path

import pytest

from tools.fuzzing import models


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    models.build(folder)
    return folder


@pytest.fixture
def llama(originals: Path, tmp_path: Path) -> Path:
    """A folder that tests may damage: one file of weights."""
    return Path(shutil.copytree(originals / "llama", tmp_path / "llama"))


@pytest.fixture
def qwen3(originals: Path, tmp_path: Path) -> Path:
    """A folder that tests may damage: two files of weights, and an index."""
    return Path(shutil.copytree(originals / "qwen3", tmp_path / "qwen3"))


@pytest.fixture
def gguf(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(originals / "plain.gguf", tmp_path / "plain.gguf"))
