"""A tiny model that tests of the executor share."""

from pathlib import Path

import pytest

from tests.stages.execute import checkpoints


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a random Llama of three layers."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write(folder, checkpoints.config_of())
    return folder
