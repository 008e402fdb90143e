"""Adapters in llama.cpp's format are those in PEFT's format that they were made of."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.lora.adapter_file import AdapterFile, path_of
from pipeline.lora.convert import convert
from pipeline.lora.gguf_adapter import PERMUTED, PLAIN
from pipeline.lora.gguf_file import MAX_HEADER_BYTES
from pipeline.lora.peft_config import AdapterError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.gguf import encoders
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.gguf.recurrent import delta_net, short_conv
from tests.lora.random_adapters import ALL, module_of, write_adapter
from tests.stages.execute.checkpoints import config_of

CONFIG = config_of()
NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
GGUF_DTYPES: dict[str, Any] = {"f16": np.float16, "f32": np.float32}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    CONFIG.save(folder)
    return folder


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = num_heads, 2, len(weights) // num_heads // 2, *weights.shape[1:]
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    alpha: float = 6.0,
    changes: dict[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", **(changes or {})}
    for key, value in fields.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_gguf(folder: Path, dtype: Any = np.float32, *, permuted: bool = True) -> dict[str, np.ndarray]:
    """What convert_lora_to_gguf.py makes of a PEFT adapter."""
    peft = load_file(folder / "adapter_model.safetensors")
    found = {}
    for layer in range(CONFIG.num_layers):
        for target in ALL:
            name = f"base_model.model.{module_of(layer, target)}"
            if (a := peft.get(f"{name}.lora_A.weight")) is None:
                continue
            b = peft[f"{name}.lora_B.weight"]
            if permuted and target in ("q_proj", "k_proj"):
                b = permute(b, CONFIG.num_heads if target == "q_proj" else CONFIG.num_kv_heads)
            found[f"blk.{layer}.{NAMES[target]}.weight.lora_a"] = a.astype(dtype)
            found[f"blk.{layer}.{NAMES[target]}.weight.lora_b"] = b.astype(dtype)
    return found


def same(model_dir: Path, one: str, other: str, tolerance: float = 0) -> None:
    first, second = (AdapterFile(path_of(model_dir, adapter_id)) for adapter_id in (one, other))
    assert len(first.header.entries) == len(second.header.entries) > 0
    for entry in first.header.entries:
        pairs = [file.matrices(entry.layer, entry.target) for file in (first, second)]
        assert pairs[0] is not None and pairs[1] is not None
        for a, b in zip(*pairs, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 0), ("f16", 1e-3)])
def test_a_gguf_adapter_is_the_peft_adapter(
    tmp_path: Path, model_dir: Path, architecture: str, dtype: str, tolerance: float
) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=4, lora_alpha=6, rank_pattern={"v_proj": 3})
    expected = convert(folder, model_dir, "f32", 16)
    tensors = as_gguf(folder, GGUF_DTYPES[dtype], permuted=architecture == "llama")
    path = write_gguf(tmp_path / "adapter.gguf", tensors, architecture=architecture)
    same(model_dir, convert(path, model_dir, "f32", 16), expected, tolerance)


def test_alpha_of_zero_is_a_factor_of_one(tmp_path: Path, model_dir: Path) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=4, lora_alpha=4)
    path = write_gguf(tmp_path / "adapter.gguf", as_gguf(folder), alpha=0.0)
    same(model_dir, convert(path, model_dir, "f32", 16), convert(folder, model_dir, "f32", 16))


def test_matrices_must_be_finite_as_they_are_stored(tmp_path: Path, model_dir: Path) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, rank=4, lora_alpha=4)
    tensors = as_gguf(folder)
    name = "blk.0.attn_v.weight.lora_b"
    tensors[name] = np.full_like(tensors[name], 3e38)
    convert(write_gguf(tmp_path / "fits.gguf", tensors, alpha=4.0), model_dir, "f32", 16)
    path = write_gguf(tmp_path / "adapter.gguf", tensors, alpha=8.0)
    with pytest.raises(AdapterError, match=r"adapter\.gguf: lora_B of 'blk\.0\.attn_v' .* not finite as f32"):
        convert(path, model_dir, "f32", 16)


def test_eight_bits(tmp_path: Path, model_dir: Path) -> None:
    """The converter's outtype q8_0."""
    config = config_of(hidden_size=64, num_heads=4, intermediate_size=96)
    folder = tmp_path / "eight"
    folder.mkdir()
    config.save(folder)
    random = np.random.default_rng(1)
    a, b = (random.normal(0, 0.1, shape).astype(np.float32) for shape in ((32, 64), (64, 32)))
    quantized = [gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0) for array in (a, b)]
    names = [f"blk.0.attn_output.weight.lora_{part}" for part in "ab"]
    path = write_gguf(tmp_path / "adapter.gguf", dict(zip(names, quantized, strict=True)), alpha=32.0)
    file = AdapterFile(path_of(folder, convert(path, folder, "f32", 32)))
    found = file.matrices(0, "o_proj")
    assert found is not None
    for ours, blocks in zip(found, quantized, strict=True):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(ours, expected)


def test_stacked_projections(tmp_path: Path, model_dir: Path) -> None:
    """`attn_qkv`, and gate and up in `ffn_up`, as in files of Phi-3."""
    queries, keys, inner = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim, 80
    random = np.random.default_rng(3)
    a = random.normal(size=(4, CONFIG.hidden_size)).astype(np.float32)
    qkv, both = (random.normal(size=(rows, 4)).astype(np.float32) for rows in (queries + 2 * keys, 2 * inner))
    tensors = {"blk.1.attn_qkv.weight.lora_a": a, "blk.1.attn_qkv.weight.lora_b": qkv}
    tensors |= {"blk.1.ffn_up.weight.lora_a": a, "blk.1.ffn_up.weight.lora_b": both}
    path = write_gguf(tmp_path / "adapter.gguf", tensors, architecture="phi3", alpha=4.0)
    file = AdapterFile(path_of(model_dir, convert(path, model_dir, "f32", 16)))
    found = [file.matrices(1, target) for target in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")]
    assert all(pair is not None and (pair[0] == a).all() for pair in found)
    stacked = [pair[1] for pair in found if pair is not None]
    assert (np.concatenate(stacked[:3]) == qkv).all() and (np.concatenate(stacked[3:]) == both).all()


def test_the_architectures_are_those_of_models() -> None:
    permuted = {name for name, one in GGUF_ARCHITECTURES.items() if one.interleaved_rope}
    assert permuted == PERMUTED
    refused = {
        "gpt2",
        "starcoder",
        "gemma-embedding",
        "gemma4",
        *delta_net.ARCHITECTURES,
        *short_conv.ARCHITECTURES,
        *encoders.ARCHITECTURES,
    }
    assert GGUF_ARCHITECTURES.keys() - permuted - PLAIN == refused, "whose PEFT adapters are refused, too"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"changes": {"general.type": "model"}}, "general.type is 'model'"),
    ({"changes": {"adapter.type": "control"}}, "adapter.type is 'control'"),
    ({"changes": {"adapter.alora.invocation_tokens": [3, 4]}}, "adapter.alora.invocation_tokens is set"),
    ({"architecture": "gpt2"}, "general.architecture is 'gpt2'"),
    ({"alpha": float("nan")}, "adapter.lora.alpha is nan"),
]


@pytest.mark.parametrize(("how", "words"), REFUSED)
def test_refused_keys(tmp_path: Path, model_dir: Path, how: dict[str, Any], words: str) -> None:
    folder = write_adapter(tmp_path / "peft", CONFIG, targets=("v_proj",))
    path = write_gguf(tmp_path / "adapter.gguf", as_gguf(folder), **how)
    with pytest.raises(AdapterError, match=words):
        convert(path, model_dir, "f32", 16)


ONES = np.ones((4, CONFIG.hidden_size), np.float32)
REFUSED_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"token_embd.weight.lora_a": ONES}, "'token_embd.weight.lora_a' is a tensor that is not part"),
    ({"blk.0.attn_norm.weight": ONES[0]}, "'blk.0.attn_norm.weight' is a tensor"),
    ({"blk.9.attn_v.weight.lora_a": ONES}, r"'blk.9.attn_v' is not a projection"),
    ({"blk.0.ffn_gate_exps.weight.lora_a": ONES}, r"'blk.0.ffn_gate_exps' is not a projection"),
    ({"blk.0.attn_q.weight.lora_a": ONES}, "'blk.0.attn_q' has no lora_b"),
    ({"blk.0.attn_v.weight.lora_a": ONES, "blk.0.attn_v.weight.lora_b": ONES[:, :4]}, "v_proj of this model has 48"),
    ({"blk.0.attn_v.weight.lora_a": ONES, "blk.0.attn_v.weight.lora_b": ONES[:, :3]}, "matrices of the shapes"),
    ({"blk.0.attn_q.weight.lora_a": ONES, "blk.0.attn_q.weight.lora_b": ONES[:, :4]}, "not whole heads of 16"),
    ({"blk.0.attn_v.weight.lora_a": ONES.astype(np.int32), "blk.0.attn_v.weight.lora_b": ONES}, "has type 26"),
    ({}, "no tensors of a LoRA adapter"),
]


@pytest.mark.parametrize(("tensors", "words"), REFUSED_TENSORS)
def test_refused_tensors(tmp_path: Path, model_dir: Path, tensors: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "adapter.gguf", tensors)
    with pytest.raises(AdapterError, match=words):
        convert(path, model_dir, "f32", 16)
    assert not (model_dir / "adapters").exists()


def test_damaged_files_are_refused(tmp_path: Path, model_dir: Path) -> None:
    """Every prefix of a file, and files in which a byte of the header has changed, are refused or read."""
    folder = write_adapter(tmp_path / "peft", CONFIG, targets=("v_proj",))
    path = write_gguf(tmp_path / "adapter.gguf", as_gguf(folder))
    data = path.read_bytes()
    random = np.random.default_rng(0)
    for end in (0, 3, 4, 10, 23, 24, 60, 200, 700, len(data) - 64):
        path.write_bytes(data[:end])
        with pytest.raises(AdapterError, match=r"adapter\.gguf"):
            convert(path, model_dir, "f32", 16)
    for _ in range(200):
        at = int(random.integers(0, 900))
        path.write_bytes(data[:at] + bytes([int(random.integers(0, 256))]) + data[at + 1 :])
        try:
            convert(path, model_dir, "f32", 16)
        except AdapterError:
            continue


def test_a_model_without_a_gate(tmp_path: Path) -> None:
    ModelConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__}, "gated": False}).save(tmp_path)
    path = write_gguf(tmp_path / "adapter.gguf", {"blk.0.ffn_gate.weight.lora_a": ONES})
    with pytest.raises(AdapterError, match=r"'blk.0.ffn_gate' is not a projection"):
        convert(path, tmp_path, "f32", 16)


def test_a_header_that_would_take_long_to_read_is_refused(tmp_path: Path, model_dir: Path) -> None:
    texts = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 65536) + b"\0" * (8 * 65536)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 40) + texts * 40)
    with pytest.raises(AdapterError, match=f"header has more than {MAX_HEADER_BYTES} bytes"):
        convert(tmp_path / "a.gguf", model_dir, "f32", 16)
