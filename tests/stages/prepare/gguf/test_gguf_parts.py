"""Models in several .gguf files, files with another alignment, and files that are cut short."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.gguf.model import convert
from pipeline.stages.prepare.progress import Report, SilentProgress
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.weights import weight_file
from tests.stages.prepare import checkpoints

MODEL = checkpoints.tiny_llama()


def prepared(path: Path) -> Path:
    return prepare(Settings(model=str(path), cache_dir=str(path.parent / "cache")))


def parts_of(folder: Path, model: LlamaForCausalLM = MODEL, stem: str = "tiny.F32") -> list[Path]:
    checkpoints.save_gguf(folder / f"{stem}.gguf", model, tensors_per_file=8)
    paths = sorted(folder.glob(f"{stem}-*.gguf"))
    assert [path.name for path in paths] == [f"{stem}-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


def assert_is_the_model(folder: Path) -> None:
    found = checkpoints.weights_of(folder)
    expected = MODEL.state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor if tensor.ndim == 1 else tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize("given", [0, 2, "folder"])
def test_parts_are_one_model_whichever_of_them_is_given(tmp_path: Path, given: int | str) -> None:
    paths = parts_of(tmp_path)
    folder = prepared(tmp_path if given == "folder" else paths[int(given)])
    assert_is_the_model(folder)
    assert ModelConfig.load(folder).name == "tiny"


def test_a_changed_part_is_noticed(tmp_path: Path) -> None:
    first, *_, last = parts_of(tmp_path)
    before = prepared(first)
    assert prepared(last) == before
    last.write_bytes(last.read_bytes() + bytes(32))
    assert prepared(first) != before


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first, second, third = parts_of(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=rf"part 3 of 3, but 1 are missing beside it: {second.name}"):
        prepared(third)
    with pytest.raises(ModelError, match=rf"{first.name} is part 1 of 3, .* missing beside it: {second.name}"):
        prepared(tmp_path)


def test_a_renamed_part_is_rejected(tmp_path: Path) -> None:
    first, second, third = parts_of(tmp_path)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"alone\.gguf is one of 3 parts .*must be NAME-00001-of-00003\.gguf"):
        prepared(alone)
    alone.rename(first)
    second.rename(tmp_path / "x")
    third.rename(second)
    (tmp_path / "x").rename(third)
    with pytest.raises(
        ModelError, match=r"00002-of-00003\.gguf says that it is part 3 of 3 .*by its name it is part 2"
    ):
        prepared(first)
    with pytest.raises(ModelError, match="part 0 of 2 is not a part"):
        prepared(third.rename(tmp_path / "tiny-00000-of-00002.gguf"))


def test_parts_of_different_models_are_rejected(tmp_path: Path) -> None:
    first, *_ = parts_of(tmp_path)
    (tmp_path / "other").mkdir()
    _, _, other = parts_of(tmp_path / "other", checkpoints.tiny_llama(tie_word_embeddings=True))
    other.replace(tmp_path / other.name)
    with pytest.raises(ModelError, match=r"is also in another part|split\.tensors\.count is \d+, but the 3 parts have"):
        prepared(first)


def test_a_folder_with_one_file_is_that_model_and_with_several_an_error(tmp_path: Path) -> None:
    checkpoints.save_gguf(tmp_path / "one.gguf", MODEL)
    assert_is_the_model(prepare(Settings(model=str(tmp_path), cache_dir=str(tmp_path / "cache"))))
    parts_of(tmp_path)
    with pytest.raises(ModelError, match=r"has 2 models in GGUF format: .* one\.gguf, tiny\.F32-00001-of-00003\.gguf"):
        prepared(tmp_path)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_may_have_another_alignment(tmp_path: Path, alignment: int) -> None:
    assert_is_the_model(prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", MODEL, alignment=alignment)))


class Memory(SilentProgress):
    """Measures this process's memory at each report."""

    def __init__(self) -> None:
        self.before_bytes = self.most_bytes = resident_bytes()
        self.num_reports = 0

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        def report(done: int, total: int) -> None:
            self.num_reports += 1
            self.most_bytes = max(self.most_bytes, resident_bytes())

        yield report


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_conversion_holds_few_tensors_in_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1536}
    small = checkpoints.save_gguf(tmp_path / "small.gguf", checkpoints.tiny_llama(num_hidden_layers=1, **sizes))
    path = checkpoints.save_gguf(tmp_path / "large.gguf", checkpoints.tiny_llama(num_hidden_layers=8, **sizes))
    tensor_bytes = 256 * 1536 * 4
    assert path.stat().st_size > 25 * tensor_bytes
    folder = tmp_path / "prepared"
    folder.mkdir()
    convert([small], tmp_path, "none", Memory())  # imports, and the allocator's first memory for each thread
    memory = Memory()
    convert([path], folder, "none", memory)
    assert memory.num_reports > 50
    # Each thread that writes has a tensor and what becomes of it.
    num_threads = min(weight_file.MAX_THREADS, len(os.sched_getaffinity(0)))
    assert memory.most_bytes - memory.before_bytes < (4 + 2 * num_threads) * tensor_bytes


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    names = {"tokenizer.chat_template.default": "{{ d }}", "tokenizer.chat_template.tool_use": "{{ t }}"}
    other = {"tokenizer.chat_template.rag": "{{ r }}"}
    folder = prepared(checkpoints.save_gguf(tmp_path / "a.gguf", MODEL, metadata=names | other, chat_template=""))
    templates = {path.name: path.read_text() for path in folder.glob("*.jinja")}
    assert templates == {"chat_template.jinja": "{{ d }}", "chat_template.tool_use.jinja": "{{ t }}"}
    folder = prepared(checkpoints.save_gguf(tmp_path / "b.gguf", MODEL, metadata=names, chat_template="{{ x }}"))
    assert (folder / "chat_template.jinja").read_text() == "{{ x }}"


def test_a_file_without_tensors_may_end_before_the_padding(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert path.stat().st_size % 32 != 0
    assert GgufFile(path).tensors == {}


def test_a_file_that_is_cut_short_says_how_many_bytes_it_has_and_needs(tmp_path: Path) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", MODEL)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=rf"it has {len(whole) - 1000} of {len(whole)} bytes; .*; get it again"):
        prepared(path)
    path.write_bytes(whole[:1000])
    with pytest.raises(ModelError, match=r"takes \d+ bytes, but only \d+ are left of the file's 1000; get it again"):
        prepared(path)
