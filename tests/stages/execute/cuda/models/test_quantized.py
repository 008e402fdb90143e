"""Weights quantized while loading: outputs equal those of a model with the dequantized weights."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from tests.stages.execute import checkpoints
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

# The second matrix of the feed-forward layer has one and a half groups.
CHANGES = {"num_layers": 1, "hidden_size": 128, "num_heads": 4, "head_dim": 32, "intermediate_size": 192}
PROMPTS = [[5, 9, 200, 31, 7], [8, 100, 3]]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_outputs_equal_those_of_the_dequantized_weights(tmp_path: Path, quantization: Any) -> None:
    plain, meant = tmp_path / "plain", tmp_path / "meant"
    for folder in (plain, meant):
        folder.mkdir()
        checkpoints.write(folder, checkpoints.config_of(**CHANGES))
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor.float()
        if "proj" in name:
            matrix = Matrix("f32", tensors[name], *tensor.shape)
            codes = DeviceMatrix.of((matrix,), torch.float32, "cpu", quantization)
            tensors[name] = codes.dequantize()
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    config = on_device(max_num_seqs=2)
    expected, ours = (
        Driver(meant, on_cpu(config)),
        CudaDriver(plain, msgspec.structs.replace(config, quantization=quantization)),
    )
    assert ours.generate(PROMPTS, 2) == expected.generate(PROMPTS, 2)
    np.testing.assert_allclose(ours.logits()[:2], expected.logits(), atol=1e-4)
