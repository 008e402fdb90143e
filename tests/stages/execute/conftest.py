"""A tiny model that tests of the executor share."""

from pathlib import Path

import pytest

from tests.stages.execute import checkpoints
from tools.fetch_test_models import FOLDER, MODELS

# A model of 1.1 GB, which `python -m tools.fetch_test_models` downloads.
collect_ignore = [] if (FOLDER / MODELS["qwen-1.5b"].file).is_file() else ["test_k_quant_models.py"]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a random Llama of three layers."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write(folder, checkpoints.config_of())
    return folder
