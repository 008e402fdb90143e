"""Engines that tests share."""

from pathlib import Path

import pytest

from pipeline.grammars.engine import Engine
from tests.stages.ingest import models


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An id for each byte."""
    return Engine(models.folder(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def engine(smollm2_dir: Path) -> Engine:
    """Of a real vocabulary, whose ids stand for parts of words."""
    return Engine(smollm2_dir)
