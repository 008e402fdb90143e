from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.gateway.gate import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate
