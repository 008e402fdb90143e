"""A tiny checkpoint as transformers saves it."""

import shutil
from pathlib import Path

import pytest

from tests.stages.prepare import checkpoints


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_folder(tmp_path_factory.mktemp("llama"), checkpoints.tiny_llama())


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))
