"""Models with the same content share one copy of the weights."""

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType

from pipeline.__main__ import main
from pipeline.cli.cache import entries as entries_module
from pipeline.cli.cache.entries import disk_bytes, entries_of
from pipeline.config.settings import PreparedFormat, Settings
from pipeline.runtime.model import in_place
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import hold
from pipeline.stages.prepare.progress import SilentProgress
from pipeline.stages.prepare.stage import digest_of, prepare
from tests.stages.prepare import checkpoints

WEIGHTS = "model.safetensors"


class ProgressLines(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """A file, and a copy of it under another name in another folder."""
    first = checkpoints.save_gguf(tmp_path / "Tiny.gguf", checkpoints.tiny_llama())
    (tmp_path / "other").mkdir()
    return first, shutil.copyfile(first, tmp_path / "other" / "Small.gguf")


def prepared(path: Path, said: SilentProgress | None = None, quantization: PreparedFormat = "q4_1") -> Path:
    """With a quantization that converts the file's tensors; `auto` leaves them in it."""
    cache = next(parent for parent in path.parents if (parent / "Tiny.gguf").exists()) / "cache"
    return prepare(Settings(model=str(path), cache_dir=str(cache), quantization=quantization), said or SilentProgress())


def test_a_copy_under_another_name_shares_the_weights_and_keeps_its_name(copies: tuple[Path, Path]) -> None:
    said = ProgressLines()
    first, second = prepared(copies[0]), prepared(copies[1], said)
    assert first != second
    assert (first / WEIGHTS).samefile(second / WEIGHTS)
    assert not (first / "model.json").samefile(second / "model.json")
    assert (ModelConfig.load(first).name, ModelConfig.load(second).name) == ("Tiny", "Small")
    assert said.lines == [f"Small has the content of {first.name}: both share one copy of the weights"]
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}


@pytest.mark.parametrize("what", ["fifo", "device"])
def test_what_another_user_of_the_cache_has_put_beside_is_not_waited_for(copies: tuple[Path, Path], what: str) -> None:
    (planted := copies[0].parent / "cache" / "model-planted").mkdir(parents=True)
    if what == "fifo":
        os.mkfifo(planted / "content.txt")
    else:
        (planted / "content.txt").symlink_to("/dev/zero")
    first, second = prepared(copies[0]), prepared(copies[1])
    assert (first / WEIGHTS).samefile(second / WEIGHTS)


def test_a_file_under_another_name_shares_what_was_made_of_it_and_is_read_itself(tmp_path: Path) -> None:
    """Without being read: its tensors stay in it."""
    kind = GGMLQuantizationType.Q8_0
    path = checkpoints.save_gguf(tmp_path / "Tiny.gguf", checkpoints.tiny_llama(), kind=kind, tensors_per_file=8)
    paths = sorted(tmp_path.glob("Tiny-*.gguf"))
    first = prepare(Settings(model=str(paths[0]), cache_dir=str(tmp_path / "cache")))
    (first / "weights.panels").write_bytes(b"packed")
    assert (first / WEIGHTS).stat().st_size < path.parent.joinpath(paths[0].name).stat().st_size // 4
    before = checkpoints.weights_of(first)
    (tmp_path / "new").mkdir()
    for one in paths:
        one.rename(tmp_path / "new" / one.name.replace("Tiny", "Small"))
    moved = sorted((tmp_path / "new").iterdir())
    second = prepare(Settings(model=str(moved[0]), cache_dir=str(tmp_path / "cache")))
    assert digest_of(second) == digest_of(prepare(Settings(model=str(moved[0]), cache_dir=str(tmp_path / "more"))))
    assert second != first and (second / "weights.panels").samefile(first / "weights.panels")
    assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoints.weights_of(second).items())
    with pytest.raises(FileNotFoundError):
        checkpoints.weights_of(first)


def test_a_file_that_was_replaced_after_it_was_prepared_is_not_read(tmp_path: Path) -> None:
    path = checkpoints.save_gguf(tmp_path / "Tiny.gguf", checkpoints.tiny_llama(), kind=GGMLQuantizationType.Q8_0)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    index = in_place.load(folder / "in_place-1.json")
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="has changed since it was prepared: start the server again"):
        checkpoints.weights_of(folder)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * index.num_bytes)
    os.utime(secret, ns=(0, 0))
    msgspec.structs.replace(index, file=str(secret), modified_ns=0).save(folder, 1)
    with pytest.raises(ValueError, match=r"secret is not a \.gguf file"):
        checkpoints.weights_of(folder)


def test_other_content_or_another_format_is_not_shared(copies: tuple[Path, Path]) -> None:
    first = prepared(copies[0])
    assert not (first / WEIGHTS).samefile(prepared(copies[1], quantization="q8_0") / WEIGHTS)
    data = bytearray(copies[1].read_bytes())
    data[-1] ^= 1
    copies[1].write_bytes(data)
    assert not (first / WEIGHTS).samefile(prepared(copies[1]) / WEIGHTS)


def test_without_hard_links_the_model_is_converted(copies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here", str(source))

    first = prepared(copies[0])
    monkeypatch.setattr(os, "link", refuse)
    second = prepared(copies[1])
    assert not (first / WEIGHTS).samefile(second / WEIGHTS)
    assert checkpoints.weights_of(first).keys() == checkpoints.weights_of(second).keys()


def test_pruning_one_leaves_the_weights_of_the_other(
    copies: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries_module, "find_servers", list)
    first, second = prepared(copies[0]), prepared(copies[1])
    own = ["--set", f"cache_dir={first.parent}"]
    weights = (first / WEIGHTS).read_bytes()
    entries = entries_of(first.parent)
    assert sum(entry.num_bytes for entry in entries) - disk_bytes(entries) == len(weights)
    assert main(["cache", "ls", *own]) == 0
    assert "models of the same content share" in capsys.readouterr().out
    held = hold(second)  # as a server does
    assert held is not None
    with held:
        assert main(["cache", "prune", "--all", *own]) == 0
    assert not first.exists()
    assert (second / WEIGHTS).read_bytes() == weights
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("removed ")
    assert "MiB" not in last  # only the small files were freed
