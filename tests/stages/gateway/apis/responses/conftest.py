"""A gateway whose model calls tools and reasons."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.settings import ChatSettings
from tests.stages.gateway.gate import Gate


@pytest.fixture
def chat_gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        yield gate
