"""A tiny model that tests of the executor share."""

from pathlib import Path

import pytest

from tests.stages.execute import checkpoints
from tools.models.fetch_test_embedders import EMBEDDERS
from tools.models.fetch_test_models import FOLDER, MODELS

# Models of 1.1 GB and 250 MB, which `python -m tools.models.fetch_test_models` downloads.
NEEDED = {"models/test_k_quant_models.py": "qwen-1.5b", "models/test_gemma.py": "gemma-270m"}
collect_ignore = [test for test, model in NEEDED.items() if not (FOLDER / MODELS[model].file).is_file()]
if not any((FOLDER / model.name).is_dir() for model in EMBEDDERS.values()):
    collect_ignore.append("encoders/test_trained_embedders.py")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a random Llama of three layers."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write(folder, checkpoints.config_of())
    return folder
