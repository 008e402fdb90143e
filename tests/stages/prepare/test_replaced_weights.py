"""Weight files of a local folder that are replaced while its server runs are not read: streams would go on with other
weights."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.weight_headers import WEIGHT_STATES
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


@pytest.mark.parametrize("has_template", [False, True])
def test_a_folder_that_was_prepared_before_it_had_the_states_of_its_files_gets_them(
    tmp_path: Path, has_template: bool
) -> None:
    source = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    settings = Settings(model=str(source), cache_dir=str(tmp_path / "cache"))
    folders = [prepare(settings)]
    if has_template:
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages[0].content }}")
        settings = msgspec.structs.replace(settings, chat_template=str(template))
        folders.append(prepare(settings))
    for folder in folders:
        stamp = msgspec.json.decode((folder / "complete.json").read_bytes())
        del stamp["files"][WEIGHT_STATES]
        (folder / "complete.json").write_bytes(msgspec.json.encode(stamp))
        (folder / WEIGHT_STATES).unlink()
    assert prepare(settings) == folders[-1], "it is not prepared again"
    assert sorted(path.name for path in folders[-1].iterdir() if path.name.startswith(WEIGHT_STATES)) == [WEIGHT_STATES]
    file = source / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"it has changed since it was prepared"):
        read(folders[-1])


def test_a_folder_elsewhere_has_its_own_files(tmp_path: Path) -> None:
    source = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    settings = [Settings(model=str(one), cache_dir=str(tmp_path / "cache")) for one in (source, copy)]
    folders = [prepare(one) for one in settings]
    (source / "model.safetensors").unlink()
    assert read(folders[1]).files
    with pytest.raises(UserError, match="can't be read any more"):
        read(folders[0])
