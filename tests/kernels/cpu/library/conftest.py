"""The fixture that tests of compiling share."""

from pathlib import Path

import pytest

from tests.kernels.cpu.library.bench import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)
