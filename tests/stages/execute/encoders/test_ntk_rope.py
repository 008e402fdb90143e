"""The scaling "ntk" of GTE's own code, which transformers does not have: multilingual GTE is published with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.test_encoders import MAX_ERROR, reference
from tests.stages.execute.encoders.tiny_encoders import Texts, Variant, make, random_ids
from tests.stages.prepare import checkpoints

VARIANT = Variant("gte", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
HEAD_DIM = 16


def frequencies(theta: float, factor: float) -> Any:
    """Those of the published code (`NTKScalingRotaryEmbedding` in modeling.py of Alibaba-NLP/new-impl): the base is
    multiplied by the factor, and each frequency divided by factor ** (2 / dimensions). Up to max_position_embeddings
    times the factor has a cache; one that is no longer than the former is not scaled."""
    half = np.arange(0, HEAD_DIM, 2, dtype=np.float64) / HEAD_DIM
    if factor <= 1:
        return theta**-half
    return (theta * factor) ** -half / factor ** (2 / HEAD_DIM)


@pytest.mark.parametrize("factor", [8.0, 2, 0.5])
def test_ntk_scaling_is_that_of_the_published_code(tmp_path: Path, factor: float) -> None:
    model = make(VARIANT)
    plain = frequencies(500.0, 1)
    np.testing.assert_allclose(model.rotary_emb.inv_freq.numpy(), plain, rtol=1e-6)
    folder = checkpoints.save_folder(
        tmp_path / "source", model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    path = folder / "model.safetensors"
    tensors = {name.replace("gte.", "new."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    checkpoints.edit_config(
        folder,
        model_type="new",
        architectures=["NewModel"],
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "ntk", "factor": factor},
    )
    ids = random_ids(120, 5)
    unscaled = reference(VARIANT, model, ids)
    model.rotary_emb.inv_freq.copy_(torch.from_numpy(frequencies(500.0, factor)).float())
    expected = reference(VARIANT, model, ids)
    assert (abs(expected - unscaled).max() > 100 * MAX_ERROR) == (factor > 1)
    prepared = prepare(Settings(model=str(folder), cache_dir=str(tmp_path / "cache")))
    (ours,) = Texts(prepared, settings(kernels="torch", kv_mib=2, tokens=256)).compute([ids])
    np.testing.assert_allclose(ours, expected, rtol=0, atol=MAX_ERROR)
