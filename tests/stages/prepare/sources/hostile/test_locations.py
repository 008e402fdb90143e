"""Files of a model that are links, special files or outside of its folder."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.stages.prepare.files import find
from pipeline.stages.prepare.sources import chat_templates, special_tokens
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.prepare.sources.hostile.attempts import assert_matches, config_of, refusal


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../other.safetensors", "a\0b", ""])
def test_an_index_with_files_outside_of_the_folder_is_rejected(qwen3: Path, name: str) -> None:
    shutil.copyfile(qwen3 / "model-1.safetensors", qwen3.parent / "other.safetensors")
    index = qwen3 / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    moved_there = {tensor: name if file == "model-1.safetensors" else file for tensor, file in weight_map.items()}
    index.write_text(json.dumps({"weight_map": moved_there}))
    assert_matches(refusal(qwen3), r"is not the name of a file inside the model folder")


FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"),
    *("chat_template.jinja", "model.safetensors.index.json"),
)

BESIDE = (
    *("special_tokens_map.json", "added_tokens.json", "processor_config.json", "chat_template.json"),
    *("additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja"),
)
"""Files that are read only if others lack something."""


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("kind", ["a FIFO", "a link", "a folder", "too large"])
def test_files_that_count_without_others_are_checked_too(llama: Path, name: str, kind: str) -> None:
    (llama / "tokenizer_config.json").write_text("{}")
    (path := llama / name).parent.mkdir(exist_ok=True)
    match kind:
        case "a FIFO":
            os.mkfifo(path)
            assert_matches(refusal(llama), rf"{name} is a FIFO, not a regular file")
            return
        case "a link":
            (outside := llama.parent / "outside").write_text("{}")
            path.symlink_to(outside)
        case "a folder":
            path.mkdir()
        case _:
            with path.open("wb") as file:
                file.truncate(2**40)
    with pytest.raises(ModelError, match=name) as caught:
        special_tokens.read(llama, {}, None, {})
        chat_templates.templates_of(llama, {})
    assert_matches(str(caught.value), "outside the model folder|not a regular file|at most [0-9]+ are allowed")


def _without_weights_for_an_index(model: Path, name: str) -> None:
    """An index is only read if there is no model.safetensors."""
    if "index" in name:
        (model / "model.safetensors").unlink()


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_rejected(llama: Path, name: str) -> None:
    outside = llama.parent / "outside"
    path = llama / name
    _without_weights_for_an_index(llama, name)
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("secret")
    path.symlink_to(outside)
    message = refusal(llama)
    assert_matches(message, rf"{name} links to \S+/outside, outside the model folder")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_special_files_are_rejected(llama: Path, name: str, kind: str) -> None:
    path = llama / name
    _without_weights_for_an_index(llama, name)
    path.unlink(missing_ok=True)
    match kind:
        case "a FIFO":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
    words = refusal(llama)
    assert name in words and ("regular file" in words or "outside the model folder" in words)


def test_a_link_to_itself_is_rejected(llama: Path) -> None:
    (llama / "config.json").unlink()
    (llama / "config.json").symlink_to("config.json")
    assert_matches(refusal(llama), r"config\.json cannot be read: Too many levels")


def test_only_the_hub_caches_own_links_out_of_the_folder_are_followed(llama: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--tiny--llama"
    snapshot, blobs = repo / "snapshots" / ("c0ffee" + "0" * 34), repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(llama.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    assert config_of(snapshot).num_layers == 2
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../refs/main")
    assert_matches(refusal(snapshot), r"generation_config\.json links to \S+/refs/main, outside the model folder")


def test_links_inside_the_folder_are_followed(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "weights")
    (llama / "model.safetensors").symlink_to("weights")
    assert find(llama, "model.safetensors") == llama / "model.safetensors"
    assert config_of(llama).num_layers == 2


def test_files_that_transformers_would_read_are_checked_first(llama: Path) -> None:
    vocab = json.loads((llama / "tokenizer.json").read_text())["model"]["vocab"]
    (llama / "tokenizer.json").unlink()
    (llama / "vocab.json").write_text(json.dumps(vocab))
    os.mkfifo(llama / "merges.txt")
    with pytest.raises(ModelError, match=r"merges\.txt is a FIFO, not a regular file"):
        config_of(llama)
    (llama / "merges.txt").unlink()
    (llama / "merges.txt").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match=r"merges\.txt links to /etc/passwd, outside"):
        config_of(llama)
    (llama / "merges.txt").unlink()
    (llama / "added_tokens.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"added_tokens\.json is not JSON"):
        config_of(llama)
