"""A GGUF model whose matrices have several formats, also within a layer, keeps them on the GPU. Its outputs equal those
of the dequantized model."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.available import weight_bytes
from pipeline.stages.execute.cuda.measuring import costs
from pipeline.stages.prepare.stage import prepare
from tests.k_quants import quantize
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver
from tests.stages.prepare import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

FORMATS: dict[str, Format] = {
    "model.embed_tokens": "q6_k",
    # As in a Q4_K_M file.
    "model.layers.0.self_attn.q_proj": "q4_k",
    "model.layers.0.self_attn.k_proj": "q4_k",
    "model.layers.0.self_attn.v_proj": "q6_k",
    "model.layers.0.self_attn.o_proj": "q4_k",
    "model.layers.0.mlp.gate_proj": "q4_k",
    "model.layers.0.mlp.up_proj": "q4_k",
    "model.layers.0.mlp.down_proj": "q6_k",
    # Gate and up differ, so they can't be fused with SwiGLU. The down projection stays in floats.
    "model.layers.1.self_attn.q_proj": "q5_0",
    "model.layers.1.self_attn.k_proj": "q5_1",
    "model.layers.1.self_attn.v_proj": "q8_0",
    "model.layers.1.self_attn.o_proj": "q5_k",
    "model.layers.1.mlp.gate_proj": "q5_k",
    "model.layers.1.mlp.up_proj": "q4_k",
}
PROMPTS = [[5, 9, 200, 31, 7], [8, 100, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder of the file."""
    path = tmp_path_factory.mktemp("gguf")
    model = checkpoints.tiny_llama(
        hidden_size=256, intermediate_size=256, tie_word_embeddings=True, initializer_range=0.06
    )
    blocks: dict[str, tuple[np.ndarray[Any, Any], Kind]] = {}
    for name, tensor in model.state_dict().items():
        if (format := FORMATS.get(name.removesuffix(".weight"))) is not None and tensor.dim() == 2:
            blocks[name] = quantize(tensor, format).data.numpy(), gguf.GGMLQuantizationType[format.upper()]
    file = checkpoints.save_gguf(path / "mixed.gguf", model, kind=Kind.BF16, blocks=blocks)
    return prepare(msgspec.structs.replace(on_device(), model=str(file), cache_dir=str(path / "cache")))


@pytest.fixture(scope="module")
def dequantized(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with all matrices in bfloat16."""
    config, plain = ModelConfig.load(folder), tmp_path_factory.mktemp("plain")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoints.weights_of(folder).items():
        format = FORMATS.get(name.removesuffix(".weight"))
        if format is None or tensor.dim() == 1:
            tensors[name] = tensor
        else:
            tensors[name] = Matrix(format, tensor, len(tensor), 256).dequantize(torch.bfloat16)
    msgspec.structs.replace(config, weight_files=["model.safetensors"]).save(plain)
    save_file(tensors, plain / "model.safetensors")
    return plain


def test_outputs_equal_those_of_the_dequantized_weights(folder: Path) -> None:
    """In float32 they differ only by the order of sums."""
    config = on_device(max_num_seqs=2)
    expected, ours = Driver(folder, on_cpu(config)), CudaDriver(folder, config)
    assert ours.generate(PROMPTS, 2) == expected.generate(PROMPTS, 2)
    np.testing.assert_allclose(ours.logits()[:2], expected.logits(), atol=1e-4)
    assert expected.logits().std() > 0.1
    assert set(ours.runner.weight_formats.split("+")) == {*FORMATS.values(), "f32"}


def test_outputs_in_bfloat16_are_near_those_of_weights_in_bfloat16(folder: Path, dequantized: Path) -> None:
    """A step of several tokens multiplies the very weights of the other model."""
    config = on_device(max_num_seqs=2, dtype="bfloat16")
    expected, ours = Driver(dequantized, on_cpu(config)), CudaDriver(folder, config)
    expected.generate(PROMPTS, 1)
    ours.generate(PROMPTS, 1)
    difference = ours.logits()[:2] - expected.logits()
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(expected.logits())


def test_memory_is_that_of_the_file(folder: Path) -> None:
    config = on_device(max_num_seqs=2, dtype="bfloat16")
    model = CudaDriver(folder, config).runner.model
    found = costs.weight_bytes(model)
    assert set(found) == {"bf16", "int8g32", "int5g32", "q4_k", "q5_k", "q6_k"}
    model_config = ModelConfig.load(folder)
    stored = checkpoints.weights_of(folder)
    norms = sum(tensor.numel() * 4 for tensor in stored.values() if tensor.dim() == 1)
    assert weight_bytes(config, model_config, folder) == sum(found.values()) + norms
    in_file = sum(tensor.numel() * tensor.element_size() for tensor in stored.values() if tensor.dim() == 2)
    assert sum(found.values()) < 1.03 * in_file
