"""Every architecture on a GPU, against transformers in float32. Kernels are interpreted here."""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda import available
from pipeline.stages.execute.models.features import TRITON, Feature
from tests.stages.execute import tiny_architectures
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import row_add
from tests.stages.execute.tiny_architectures import EQUAL_LAYERS, VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

FEW = (
    "phi3, long longrope",  # partial rotary embedding, stacked matrices
    "gemma2",  # norms after layers, caps of scores and logits, GELU as the gate, a factor of embeddings
    "olmo2",  # no norms before layers, a norm of all heads of queries and keys
    "cohere",  # layer norms, also of each head of queries and keys, one norm for parallel layers, adjacent pairs
    "gpt_neox",  # two norms for parallel layers, plain GELU, biases
    "falcon rw",  # ALiBi
    "bloom",  # a norm of embeddings
    "opt",  # learned positions with an offset, ReLU
    "ministral3",  # a factor of queries by their position
    "granite",  # factors of embeddings, scores, results and logits
    "qwen2_moe, some layers",  # a shared expert with a gate, and a dense layer
    "olmoe",
    "glm4_moe, groups",  # experts in groups, a selection bias, sigmoid scores
    "gpt_oss",  # sinks, biases of experts, clamped SwiGLU, windows in some layers
)
NAMES: tuple[str, ...] = FEW
if os.environ.get("PIPELINE_ALL_GPU_ARCHITECTURES"):
    NAMES = tuple(name for name, variant in EQUAL_LAYERS.items() if variant.kind != "apertus")
LENGTH = 27
"""Longer than every window of the variants."""


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    changes = {**variant.changes}
    if name == "smollm3":
        changes["no_rope_layers"] = [1, 0]
    if "layer_types" in changes:
        changes["layer_types"] = changes["layer_types"][:2]
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        if key in changes:
            changes[key] = 2
    sizes = {**variant.sizes, "num_hidden_layers": 2} if variant.sizes else {}
    folder, model = tiny_architectures.write(tmp_path, replace(variant, changes=changes, sizes=sizes))
    ids = np.random.default_rng(1).integers(3, 600, LENGTH).tolist()
    device = on_device(kv_bytes=2 * 1024**2, tokens=32)
    # A row has one block table here; test_groups.py has those of groups.
    execute = msgspec.structs.replace(device.execute, hybrid_kv_cache_manager=False)
    driver = CudaDriver(folder, msgspec.structs.replace(device, execute=execute, max_model_len=variant.max_model_len))
    blocks, last = driver.take_blocks(2 * 16), LENGTH - 1
    made = []
    driver.step([(0, 0, last, True)], adds=[row_add(0, ids[:last], blocks)])
    made.append(driver.logits()[0])
    driver.step(drops=[0])
    driver.step([(1, last, 1, True)], adds=[row_add(1, ids, blocks)])  # decodes
    made.append(driver.logits()[0])
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(made, theirs[last - 1 :], rtol=0, atol=1e-4)


def test_a_model_that_needs_more_is_refused_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny_architectures.write(tmp_path, VARIANTS["gpt_oss"])
    monkeypatch.setattr(available, "TRITON", TRITON - {Feature.SINKS, Feature.EXPERT_BIAS})
    words = r"source \(gpt_oss\) needs: attention sinks, biases of experts\. Set execute\.device"
    with pytest.raises(UserError, match=words):
        available.require(on_device(), ModelConfig.load(folder), folder)
