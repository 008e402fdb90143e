"""Weight files of a local folder that are replaced while its server runs are not read: streams would go on with other
weights."""

import os
import shutil
from pathlib import Path

import pytest

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.weights import Weights
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints


def read(folder: Path) -> Weights:
    return Weights(folder, ModelConfig.load(folder), "f32")


@pytest.mark.parametrize("how", ["renamed", "written"])
def test_a_replaced_file_is_named_and_the_next_start_reads_it(tmp_path: Path, how: str) -> None:
    source = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    settings = Settings(model=str(source), cache_dir=str(tmp_path / "cache"))
    folder, file = prepare(settings), source / "model.safetensors"
    assert read(folder).files
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if how == "renamed":
        other = tmp_path / "other.safetensors"
        other.write_bytes(data)
        os.utime(other, ns=(0, file.stat().st_mtime_ns + 1))
        other.rename(file)
    else:
        before = file.stat().st_mtime_ns
        file.write_bytes(data)
        os.utime(file, ns=(0, before + 1))  # a file system may count in large steps
    with pytest.raises(
        UserError,
        match=r"model.safetensors can.t be read any more: it has changed since it was prepared: start the server again",
    ):
        read(folder)
    assert prepare(settings) != folder
    assert read(prepare(settings)).files


def test_a_folder_elsewhere_has_its_own_files(tmp_path: Path) -> None:
    source = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    settings = [Settings(model=str(one), cache_dir=str(tmp_path / "cache")) for one in (source, copy)]
    folders = [prepare(one) for one in settings]
    (source / "model.safetensors").unlink()
    assert read(folders[1]).files
    with pytest.raises(UserError, match="can't be read any more"):
        read(folders[0])
