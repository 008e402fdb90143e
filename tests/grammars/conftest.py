"""Grammar engines that tests share."""

from pathlib import Path

import pytest

from pipeline.grammars.engine import Engine
from tests.stages.ingest import models


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One token id for each byte."""
    return Engine(models.folder(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def engine(smollm2_dir: Path) -> Engine:
    """With a real subword vocabulary."""
    return Engine(smollm2_dir)
