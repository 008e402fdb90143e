"""Fixtures of tests that replay a recording."""

from pathlib import Path

import pytest

from tests.stages.detokenize.vocabularies import byte_level


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
