"""Fixtures of tests that replay a recording."""

from pathlib import Path

import pytest

from tests.stages.detokenize.vocabularies import byte_level, save


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    save(byte_level(), tmp_path)
    return tmp_path
