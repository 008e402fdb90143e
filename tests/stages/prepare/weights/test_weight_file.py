"""Weights are stored in the format of the file, or in the requested one."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from transformers import LlamaForCausalLM

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import CONVERTED
from pipeline.stages.prepare.gguf.conversions import mxfp4_to_q8_0
from pipeline.stages.prepare.progress import for_stream
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.weights import weight_file
from pipeline.stages.prepare.weights.tensors import read_header
from pipeline.stages.prepare.weights.weight_file import to_bf16
from tests.stages.execute import tiny_architectures
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.checkpoints import formats_of, weights_of

KINDS = {name: Kind[name.upper()] for name in ("q8_0", "q4_1", "q4_0", "q5_0", "q5_1")}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return checkpoints.tiny_llama()


def prepared(path: Path, quantization: Any = "auto") -> Path:
    return prepare(Settings(model=str(path), cache_dir=str(path.parent / "cache"), quantization=quantization))


def through(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The values of a matrix after a round trip through a format."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))


def blocks_of(tensor: torch.Tensor, format: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quantize(tensor.numpy(), KINDS[format]))


# ------------------------------------------------------------------------------------------- formats of a .gguf file


@pytest.mark.parametrize("format", KINDS)
def test_blocks_are_stored_unchanged(tmp_path: Path, model: LlamaForCausalLM, format: str) -> None:
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=KINDS[format]))
    found, formats = weights_of(folder), formats_of(folder)
    for name, tensor in model.state_dict().items():
        vector = tensor.ndim == 1
        assert formats[name] == ("f32" if vector else format)
        assert torch.equal(found[name], tensor if vector else blocks_of(tensor, format)), name


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_floats_become_bfloat16(tmp_path: Path, model: LlamaForCausalLM, kind: Kind) -> None:
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=kind))
    found = weights_of(folder)
    for name, tensor in model.state_dict().items():
        expected = tensor if tensor.ndim == 1 else through(tensor, kind).to(torch.bfloat16)
        assert torch.equal(found[name], expected), name


def random_blocks(kind: Kind, rows: int = 256, columns: int = 256) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Random bytes with small scales: the gguf package cannot write K-quants."""
    random = np.random.default_rng(0)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // block, num_bytes), dtype=np.uint8)
    begin, end = HALVES[kind]
    halves = random.uniform(0.001, 0.02, (len(blocks), (end - begin) // 2)).astype(np.float16)
    blocks[:, begin:end] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


HALVES = {
    **dict.fromkeys((Kind.Q4_K, Kind.Q5_K), (0, 4)),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS), (0, 2)),
    Kind.Q2_K: (80, 84),
    Kind.Q3_K: (108, 110),
    Kind.Q6_K: (208, 210),
}
"""Bytes of a block that are float16."""
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def prepared_with(path: Path, kind: Kind, blocks: "np.ndarray[Any, np.dtype[np.uint8]]", **how: Any) -> Path:
    """The folder of a model with one matrix in such blocks."""
    model = checkpoints.tiny_llama(hidden_size=256, num_hidden_layers=1)
    return prepared(checkpoints.save_gguf(path / "k.gguf", model, blocks={O_PROJ: (blocks, kind)}), **how)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_are_stored_unchanged(tmp_path: Path, kind: Kind) -> None:
    blocks = random_blocks(kind)
    folder = prepared_with(tmp_path, kind, blocks)
    assert formats_of(folder)[O_PROJ] == kind.name.lower()
    assert np.array_equal(weights_of(folder)[O_PROJ], blocks)
    assert not (folder / CONVERTED).exists()


@pytest.mark.parametrize(
    ("kind", "format"),
    [(Kind.Q3_K, "q6_k"), (Kind.IQ4_NL, "q8_0"), (Kind.IQ4_XS, "q8_0"), (Kind.Q2_K, "bf16")],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_blocks_become_the_nearest_format(tmp_path: Path, kind: Kind, format: str) -> None:
    blocks = random_blocks(kind)
    exact = torch.from_numpy(gguf.dequantize(blocks, kind))
    folder = prepared_with(tmp_path, kind, blocks)
    found = weights_of(folder)[O_PROJ]
    assert formats_of(folder)[O_PROJ] == format
    assert (folder / CONVERTED).read_text() == f"matrices: 1 {kind.name} become {format}\n"
    if format == "bf16":
        assert torch.equal(found, exact.to(torch.bfloat16))
        return
    values = torch.from_numpy(gguf.dequantize(found.numpy(), Kind[format.upper()]))
    # Only the scales of IQ4_XS are rounded, by at most half of the last of 11 bits.
    error = 2.0**-11 if kind == Kind.IQ4_XS else 0.0
    assert bool(((values - exact).abs() <= error * exact.abs()).all())


@pytest.mark.parametrize("kind", [Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.Q6_K], ids=lambda kind: kind.name)
def test_blocks_are_dequantized_if_floats_are_wanted(tmp_path: Path, kind: Kind) -> None:
    blocks = random_blocks(kind)
    folder = prepared_with(tmp_path, kind, blocks, quantization="none")
    assert torch.equal(weights_of(folder)[O_PROJ], torch.from_numpy(gguf.dequantize(blocks, kind)).to(torch.bfloat16))
    assert (folder / CONVERTED).read_text() == f"matrices: 1 {kind.name} become bf16\n"


def test_mxfp4_keeps_its_values_unless_they_are_tiny() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (40, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(104, 144)  # the powers of two of float16, which may be denormal
    values = gguf.dequantize(blocks, Kind.MXFP4)
    np.testing.assert_array_equal(gguf.dequantize(mxfp4_to_q8_0(blocks), Kind.Q8_0), values)
    blocks[:, 0] = 90
    assert np.abs(gguf.dequantize(blocks, Kind.MXFP4)).max() < 1e-6
    assert not gguf.dequantize(mxfp4_to_q8_0(blocks), Kind.Q8_0).any()
    blocks[:, 0] = 150
    with pytest.raises(ValueError, match="too large for float16"):
        mxfp4_to_q8_0(blocks)
    blocks[:, 1:] = 0  # zeros have any scale
    assert not gguf.dequantize(mxfp4_to_q8_0(blocks), Kind.Q8_0).any()


def test_scales_that_do_not_fit_are_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    blocks = random_blocks(Kind.IQ4_XS)
    blocks.reshape(-1, 136)[:, :2] = np.full((256, 1), 30000, np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_output\.weight is IQ4_XS: scales .* too large"):
        prepared_with(tmp_path, Kind.IQ4_XS, blocks)


def test_a_file_may_mix_formats(tmp_path: Path, model: LlamaForCausalLM) -> None:
    weight = model.state_dict()[DOWN].numpy()
    other = {DOWN: (gguf.quantize(weight, Kind.Q8_0), Kind.Q8_0)}
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=Kind.F16, blocks=other))
    assert {name for name, format in formats_of(folder).items() if format not in ("bf16", "f32")} == {DOWN}
    assert np.array_equal(weights_of(folder)[DOWN], other[DOWN][0])


# ------------------------------------------------------------------------------------------------ requested formats


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F32])
def test_none_converts_everything_to_floats(tmp_path: Path, model: LlamaForCausalLM, kind: Kind) -> None:
    found = weights_of(prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=kind), "none"))
    for name, tensor in model.state_dict().items():
        expected = tensor if tensor.ndim == 1 else through(tensor, kind).to(torch.bfloat16)
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q5_1, Kind.Q4_0], ids=lambda kind: kind.name)
def test_a_gguf_is_quantized_from_its_exact_values(
    tmp_path: Path, model: LlamaForCausalLM, kind: Kind, format: str
) -> None:
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=kind), format)
    found, formats = weights_of(folder), formats_of(folder)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            assert torch.equal(found[name], tensor), name
            continue
        expected = "q8_0" if name in TABLES else format
        assert formats[name] == expected
        assert torch.equal(found[name], blocks_of(through(tensor, kind), expected)), name


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_blocks_in_the_requested_format_are_not_rounded_again(
    tmp_path: Path, model: LlamaForCausalLM, format: str
) -> None:
    """Random codes: unlike a quantizer's, the largest value of a block is seldom the largest code."""
    wide = model.state_dict()[Q].shape[1] // 32
    random = np.random.default_rng(3)
    num_bytes = gguf.GGML_QUANT_SIZES[KINDS[format]][1]
    blocks = random.integers(0, 100, (64, wide, num_bytes), dtype=np.uint8)
    blocks[:, :, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    data = blocks.reshape(64, -1)
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, blocks={Q: (data, KINDS[format])})
    rows = np.argsort(checkpoints.permute(np.arange(64), 4))
    assert np.array_equal(weights_of(prepared(path, format))[Q], data[rows])


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_folder_is_quantized_from_its_exact_values(tmp_path: Path, dtype: torch.dtype, format: str) -> None:
    model = checkpoints.tiny_llama(attention_bias=True).to(dtype)
    source = checkpoints.save_folder(tmp_path / "tiny", model, shard_size="100KB")
    folder = prepared(source, format)
    assert ModelConfig.load(folder).weight_files == ["model.safetensors"]
    found, formats = weights_of(folder), formats_of(folder)
    assert set(found) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            assert torch.equal(found[name], tensor.float()), name
            continue
        expected = "q8_0" if name in TABLES else format
        assert formats[name] == expected
        assert torch.equal(found[name], blocks_of(tensor.float(), expected)), name


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    source = checkpoints.save_folder(tmp_path / "tied", checkpoints.tiny_llama(tie_word_embeddings=True))
    formats = formats_of(prepared(source, "q4_1"))
    assert formats["model.embed_tokens.weight"] == "q8_0"
    assert "lm_head.weight" not in formats


@pytest.mark.parametrize("made", ["folder", "gguf"])
def test_columns_that_do_not_fill_groups_stay_bfloat16(tmp_path: Path, made: str) -> None:
    model = checkpoints.tiny_llama(intermediate_size=80)
    if made == "folder":
        source = checkpoints.save_folder(tmp_path / "odd", model)
    else:
        source = checkpoints.save_gguf(tmp_path / "odd.gguf", model)
    folder = prepared(source, "q8_0")
    formats = formats_of(folder)
    assert {name for name, format in formats.items() if format == "bf16"} == {
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)
    }
    assert torch.equal(weights_of(folder)[DOWN], model.state_dict()[DOWN].to(torch.bfloat16))


def test_a_folder_is_copied_only_if_it_is_quantized(tmp_path: Path, model: LlamaForCausalLM) -> None:
    source = checkpoints.save_folder(tmp_path / "tiny", model)
    folder = prepared(source)
    assert ModelConfig.load(folder).weight_paths(folder) == [source / "model.safetensors"]
    assert prepared(source, "none") == folder
    assert len({folder, prepared(source, "q8_0"), prepared(source, "q4_1")}) == 3
    assert prepared(source, "q8_0") == prepared(source, "q8_0")


def test_a_gguf_has_a_cache_entry_for_each_quantization(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model)
    assert len({prepared(path, quantization) for quantization in ("auto", "none", "q8_0", "q4_1")}) == 4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gpu_formats_are_stored_as_floats(tmp_path: Path, model: LlamaForCausalLM, quantization: str) -> None:
    """So they use the folder of "none", which is converted once for all of them."""
    gguf_path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model)
    folder = checkpoints.save_folder(tmp_path / "tiny", model)
    for path in (gguf_path, folder):
        assert prepared(path, quantization) == prepared(path, "none")


def test_quantizing_a_folder_is_logged(
    tmp_path: Path, model: LlamaForCausalLM, capfd: pytest.CaptureFixture[str]
) -> None:
    source = checkpoints.save_folder(tmp_path / "tiny", model)
    settings = Settings(model=str(source), cache_dir=str(tmp_path / "cache"), quantization="q4_1")
    prepare(settings, for_stream())
    out, err = capfd.readouterr()
    assert out == ""
    assert "quantizing tiny to q4_1: done, 0.1 MB" in err


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e8])
@pytest.mark.parametrize("quantization", ["q8_0", "q4_1"])
def test_the_error_for_values_outside_of_a_formats_range_names_the_tensor(
    tmp_path: Path, wrong: float, quantization: str
) -> None:
    model = checkpoints.tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[5, 70] = wrong
    source = checkpoints.save_folder(tmp_path / "tiny", model)
    words = rf"tiny: tensor {DOWN} can't be stored as {quantization}: values are not finite, or too large"
    with pytest.raises(ModelError, match=words):
        prepared(source, quantization)
    with pytest.raises(ModelError, match=rf"tiny\.gguf: tensor {DOWN} can't"):
        prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model), quantization)


# ------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("quantization", ["auto", "q4_1"])
def test_large_tensors_are_converted_in_pieces(
    tmp_path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    gguf_path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, kind=Kind.Q8_0)
    source = checkpoints.save_folder(tmp_path / "tiny", model)
    whole = [weights_of(prepared(path, quantization)) for path in (gguf_path, source)]
    sizes = []
    monkeypatch.setattr(weight_file, "CHUNK_VALUES", 7 * 64)
    encode = weight_file.encode
    monkeypatch.setattr(
        weight_file, "encode", lambda values, format: sizes.append(values.size) or encode(values, format)
    )
    (tmp_path / "cache").rename(tmp_path / "first")
    for path, expected in zip((gguf_path, source), whole, strict=True):
        found = weights_of(prepared(path, quantization))
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert 0 < max(sizes) <= 7 * 64


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    """Readers view the bytes as numbers, and some reject unaligned ones."""
    odd = {"vocab_size": 609, "hidden_size": 33, "intermediate_size": 32, "head_dim": 6}
    model = checkpoints.tiny_llama(num_attention_heads=3, num_key_value_heads=1, **odd)
    state = model.state_dict()
    path = checkpoints.save_gguf(tmp_path / "a.gguf", model, metadata={"llama.attention.key_length": 6})
    folder = prepared(path, "q8_0")
    entries = read_header(folder / "model.safetensors")
    assert {entry.dtype for entry in entries.values()} == {"F32", "BF16", "U8"}
    for entry in entries.values():
        assert entry.data_offsets[0] % {"F32": 4, "BF16": 2, "U8": 1}[entry.dtype] == 0
    assert torch.equal(weights_of(folder)["model.norm.weight"], state["model.norm.weight"])


@given(np_st.arrays(np.float32, 40, elements=st.floats(width=32)))
def test_rounding_to_bfloat16_is_that_of_torch(values: "np.ndarray[Any, Any]") -> None:
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_numbers_without_a_dimension_are_kept_when_a_folder_is_quantized(tmp_path: Path) -> None:
    """Those of Apertus's activation."""
    made = tiny_architectures.make(VARIANTS["apertus"])
    folder = prepared(checkpoints.save_folder(tmp_path / "source", made), "q8_0")
    name = "model.layers.0.mlp.act_fn.beta"
    assert weights_of(folder)[name].item() == made.state_dict()[name].item()
