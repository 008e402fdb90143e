"""What is subtracted from keys in 8 bits: a vector that all keys of a head have in common."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.kernels.attention.hadamard import transform_heads
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.key_calibration import KeyFactors, hadamard
from pipeline.stages.execute.layers.key_center import key_center
from pipeline.stages.execute.program import AttentionWeights, HeadNorms, Linear
from tests.stages.execute.checkpoints import config_of
from tests.stages.execute.native_driver import ISAS, Native, write

NOTHING = Linear((), None)


def weights_of(config: ModelConfig, bias: np.ndarray | None, norms: HeadNorms | None = None) -> AttentionWeights:
    return AttentionWeights(
        norm=None,
        qkv=Linear((), bias),
        out=NOTHING,
        heads=config.heads_of(0),
        head_norms=norms,
        window=None,
        rope=config.rope_of(0),
    )


def test_the_center_of_biases_is_near_them_where_they_hardly_rotate() -> None:
    config = config_of(head_dim=32, rope_theta=1e9, max_position=4096)
    bias = np.random.default_rng(0).standard_normal((6 + 2 + 2, 32)).astype(np.float32)
    center = key_center(config, weights_of(config, bias.reshape(-1)), 256)
    assert center is not None and center.shape == (2, 32)
    keys = bias[6:8]
    slow = [i + part for part in (0, 16) for i in range(12, 16)]
    np.testing.assert_allclose(center[:, slow], keys[:, slow], atol=0.01)
    assert np.abs(center[:, [0, 16]]).max() < 0.1, "a pair that rotates at once has no mean"


def test_without_a_bias_or_with_scores_of_which_sizes_matter_there_is_none() -> None:
    config = config_of()
    bias = np.ones(10 * 16, np.float32)
    norms = HeadNorms(np.ones(16, np.float32), np.ones(16, np.float32))
    assert key_center(config, weights_of(config, bias), 256) is not None
    assert key_center(config, weights_of(config, None), 256) is None
    assert key_center(config, weights_of(config, bias, norms), 256) is None
    assert key_center(config_of(attention_softcap=30.0), weights_of(config, bias), 256) is None
    assert key_center(config_of(sinks=True), weights_of(config, bias), 256) is None


@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_the_transform_is_its_own_inverse(head_dim: int) -> None:
    heads = np.random.default_rng(0).standard_normal((3, head_dim)).astype(np.float32)
    np.testing.assert_allclose(hadamard(hadamard(heads)), heads, atol=1e-5)
    if head_dim & (head_dim - 1) == 0:
        np.testing.assert_allclose(hadamard(heads), transform_heads(torch.from_numpy(heads)).numpy(), atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_means_and_factors_don_t_depend_on_how_they_are_measured(tmp_path: Path, isa: str) -> None:
    write(tmp_path, config_of(architecture="qwen2", qkv_bias=True))
    centers, factors = [], []
    for tokens in (256, 48):
        driver = Native(tmp_path, isa, kv_dtype="int8", tokens=tokens)
        layers = driver.program._attention._calibrated
        centers.append(np.stack([layer.center for layer in layers]))
        factors.append(np.stack([layer.factors.factors for layer in layers if layer.factors is not None]))
        driver.runner.close()
    assert centers[0].shape == factors[0].shape == (3, 2, 16) and (centers[0] != 0).all()
    np.testing.assert_array_equal(centers[0], centers[1])
    np.testing.assert_array_equal(factors[0], factors[1])
    assert np.ptp(factors[0], axis=-1).min() > 0
    np.testing.assert_array_equal(factors[0][..., :8], factors[0][..., 8:], "dimensions that rotate together")


def test_factors_make_the_errors_of_scores_small() -> None:
    """Keys are large in dimensions in which queries are small."""
    random = np.random.default_rng(0)
    sizes = np.array([30, 1, 1, 0.5, 1, 2, 1, 1] * 2)
    keys, queries = random.standard_normal((500, 1, 16)) * sizes, random.standard_normal((500, 2, 16)) / sizes
    factors = KeyFactors(2, 1, 16)
    factors._squares[:] = np.square(queries).sum(0)
    factors.choose(keys.astype(np.float32))
    np.testing.assert_allclose(factors.factors[0], np.exp(np.log(sizes).mean()) / sizes, rtol=0.1)
    assert factors.native.query_squares is None

    def error(factor: np.ndarray) -> float:
        scaled = hadamard((keys * factor).astype(np.float32))
        steps = np.abs(scaled).max(-1, keepdims=True) / 127
        rounded = hadamard(np.rint(scaled / steps) * steps) / factor
        return float(np.square(np.einsum("thd,shd->tsh", rounded - keys, queries[:, :1])).mean())

    assert error(factors.factors) < 0.05 * error(np.ones(16))


def test_without_sizes_factors_stay() -> None:
    factors = KeyFactors(2, 1, 16)
    factors.choose(np.ones((3, 1, 16), np.float32))
    assert (factors.factors == 1).all(), "no query was measured"
