"""Fixtures of tests that replay a recording."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.stages.detokenize.vocabularies import byte_level


@pytest.fixture(autouse=True)
def collector() -> Any:
    yield
    gc.unfreeze()


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
