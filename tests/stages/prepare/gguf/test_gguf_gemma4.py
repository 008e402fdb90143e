"""Gemma 4's .gguf files: what is read in the file, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import ProportionalRope
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.weights import Weights
from pipeline.stages.prepare.gguf import gemma4
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import tiny_architectures
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.tiny_architectures import VARIANTS, VOCAB_SIZE
from tests.stages.prepare.gguf.architectures import CASES, IDS, Case, Kind, save

TABLE = "per_layer_token_embd.weight"


def prepared(folder: Path, **changes: Any) -> Path:
    """The prepared folder of the file with other values of its keys."""
    case = CASES["gemma4"]
    model = tiny_architectures.make(VARIANTS["gemma4"])
    path = save(folder / "tiny.gguf", model, Case(case.variant, case.arch, {**case.metadata, **changes}))
    return prepare(Settings(model=str(path), cache_dir=str(folder / "cache")))


def test_a_quantized_table_of_inputs_is_read_in_the_gguf_file(tmp_path: Path) -> None:
    model, case = tiny_architectures.make(VARIANTS["gemma4"]), CASES["gemma4"]
    table = model.state_dict()["model.embed_tokens_per_layer.weight"].numpy()
    blocks = {TABLE: (gguf.quantize(table, Kind.Q8_0), Kind.Q8_0)}
    path = save(tmp_path / "tiny.gguf", model, case, blocks)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    weights = Weights(folder, ModelConfig.load(folder), "bf16", keeps_floats=True)
    found = weights.in_file("model.per_layer_embeddings.weight", VOCAB_SIZE, 6 * 32)
    assert found.format == "q8_0"
    size = path.stat().st_size
    (mapped,) = (np.frombuffer(file._map, np.uint8) for file in weights.files if file.num_bytes == size)
    assert mapped.ctypes.data < found.data.ctypes.data < mapped.ctypes.data + size, "the .gguf file itself"
    rows = found.data[:8]
    np.testing.assert_array_equal(rows, blocks[TABLE][0][:8].view(np.uint8).reshape(8, -1))
    logits = []
    for kernels, dtype in (("torch", "float32"), ("auto", "bfloat16")):
        driver = Driver(folder, settings(tokens=256, kv_mib=2, kernels=kernels, dtype=dtype))
        driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
        logits.append(driver.logits()[0])
        is_native = isinstance(driver.runner.program, NativeProgram)
    assert is_native
    assert np.sqrt(np.mean((logits[1] - logits[0]) ** 2)) < 0.05 * logits[0].std()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.shared_kv_layers": 6}, "shared_kv_layers is 6; each of these layers must have one of its kind"),
        ({"attention.shared_kv_layers": 4}, "shared_kv_layers is 4; each of these layers must have one of its kind"),
        ({"attention.head_count_kv": [1, 2, 1, 1, 1, 1]}, "head_count_kv is .* in layers of one kind: not supported"),
        ({"attention.head_count_kv": [1, 1]}, "head_count_kv is .*; it must be an integer, or one for each"),
        ({"attention.value_length_swa": 32}, "value_length_swa is 32: a value size other than the key size"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.type is 'yarn': this rope scaling"),
    ],
    ids=str,
)
def test_what_a_file_may_not_have_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        prepared(tmp_path, **changes)


class Tensor(msgspec.Struct):
    data: np.ndarray
    name: str = "rope_freqs.weight"
    kind: Kind = Kind.F32


@pytest.mark.parametrize(
    ("factors", "part"),
    [([1.0] * 4 + [1e30] * 12, 0.25), ([1.0] * 16, None), ([1.0] * 16 + [1e30] * 16, 0), ([1.0] * 4 + [2.0] * 12, 0)],
    ids=["a quarter", "all", "another size", "other divisors"],
)
def test_divisors_of_frequencies_say_which_pairs_rotate(
    tmp_path: Path, factors: list[float], part: float | None
) -> None:
    config = msgspec.structs.replace(ModelConfig.load(prepared(tmp_path)), rope_scaling=None)
    tensor: Any = Tensor(np.array(factors, np.float32).view(np.uint8))
    if part == 0:
        with pytest.raises(ModelError, match=r"rope_freqs.weight must be F32 of 16 numbers, ones and then 1e\+30"):
            gemma4.with_proportional_rope(config, tensor, tmp_path)
    else:
        expected = None if part is None else ProportionalRope(part=part)
        assert gemma4.with_proportional_rope(config, tensor, tmp_path).rope_scaling == expected


def test_keys_and_values_that_no_layer_uses_are_dropped(tmp_path: Path) -> None:
    config = ModelConfig.load(prepared(tmp_path))
    tensors: Any = {f"blk.{i}.attn_{name}.weight": None for i in range(6) for name in ("q", "k", "v")}
    (line,) = gemma4.drop_unused(tensors, config)
    assert line == "ignored 'blk.3.attn_k.weight' and 5 more: the layer reads the keys and values of another"
    assert [name for name in tensors if "attn_k" in name] == [f"blk.{i}.attn_k.weight" for i in range(3)]
    assert gemma4.drop_unused(tensors, config) == []
