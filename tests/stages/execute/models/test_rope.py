"""Rotary tables are those of transformers, computed without torch."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.runtime.model.rope import Llama3Rope
from pipeline.stages.execute.layers.rope import rope_frequencies, rope_table

SCALING = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 8e6])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_frequencies_are_those_of_torch_but_for_the_last_bit(head_dim: int, theta: float) -> None:
    expected = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    found = rope_frequencies(head_dim, theta, None)
    assert found.dtype == np.float32
    np.testing.assert_array_max_ulp(found, expected.numpy(), 1)


def test_scaled_frequencies_are_those_of_transformers() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found = rope_frequencies(128, 500000.0, SCALING)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert (found < rope_frequencies(128, 500000.0, None)).any(), "nothing was scaled"


def test_tables_are_rounded_correctly() -> None:
    frequencies = rope_frequencies(64, 1e5, None)
    cos, sin = rope_table(frequencies, 8192)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (8192, 32)
    # The angle is a float32, as in transformers.
    angles = torch.outer(torch.arange(8192, dtype=torch.float32), torch.from_numpy(frequencies)).double()
    assert torch.equal(torch.from_numpy(cos), torch.cos(angles).float())
    assert torch.equal(torch.from_numpy(sin), torch.sin(angles).float())
