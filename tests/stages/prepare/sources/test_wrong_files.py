"""What a failed download leaves in the place of a model's file is named, before anything is read or hashed."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len

from pipeline.config.settings import Settings
from pipeline.stages.prepare.progress import Lines, ProgressBar
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\n"
PAGE = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>"


@pytest.mark.parametrize(
    ("data", "words"), [(LFS, "is a pointer of Git LFS.*git lfs pull"), (PAGE, "is a web page.*resolve")]
)
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "config.json"])
def test_a_pointer_or_a_page_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    folder = tmp_path / "model"
    path = folder / name
    folder.mkdir()
    if path.suffix != ".gguf":
        checkpoints.save_folder(folder, checkpoints.tiny_llama())
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"{name} {words}"):
        prepare(Settings(model=str(path if path.suffix == ".gguf" else folder), cache_dir=str(tmp_path / "cache")))


def test_an_architecture_that_is_not_supported_is_reported_in_a_short_line_before_the_file_is_read(
    tmp_path: Path,
) -> None:
    path = checkpoints.save_gguf(tmp_path / "a.gguf", checkpoints.tiny_llama(), architecture="mamba")
    said = StringIO()
    with pytest.raises(ModelError) as caught:
        prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")), Lines(said))
    assert len(str(caught.value)) < len(str(path)) + 150
    assert said.getvalue() == ""


def test_the_bar_fits_80_columns_and_ends_with_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with ProgressBar(screen).measure("downloading " + "some-long-name-" * 6) as report:
        report(0, 12_345_600_000)
        report(12_345_600_000, 12_345_600_000)
    lines = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", screen.getvalue())]
    assert max(map(cell_len, lines)) <= 80
    last = [line for line in lines if "downloading" in line][-1]
    assert "12.3/12.3 GB" in last and "MB/s" in last and "?" not in last
