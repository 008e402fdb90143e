"""Architectures whose differences end when the weights are loaded, on a GPU; others are refused by name. Kernels are
interpreted here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import UserError
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cuda.available import require
from tests.stages.execute import tiny_architectures
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import row_add
from tests.stages.execute.tiny_architectures import VARIANTS, Variant

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

# Partial rotary embedding and stacked matrices; the same with adjacent pairs; a layer without rotary embedding;
# mixtures of experts in all layers, in some beside a shared expert, and with weights that are normalized.
NAMES = ("phi3, long longrope", "glm", "smollm3", "mixtral", "qwen2_moe, some layers", "qwen3_moe")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    changes = {**variant.changes}
    if name == "smollm3":
        changes["no_rope_layers"] = [1, 0]
    small = Variant(variant.kind, changes, {**variant.sizes, "num_hidden_layers": 2})
    folder, model = tiny_architectures.write(tmp_path, small)
    ids = np.random.default_rng(1).integers(3, 600, 15).tolist()
    driver = CudaDriver(folder, on_device(kv_bytes=2 * 1024**2))
    blocks = driver.take_blocks(16)
    driver.step([(0, 0, 14, True)], adds=[row_add(0, ids[:14], blocks)])
    made = [driver.logits()[0]]
    driver.step(drops=[0])
    driver.step([(1, 14, 1, True)], adds=[row_add(1, ids, blocks)])  # decodes
    made.append(driver.logits()[0])
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(made, theirs[13:], rtol=0, atol=1e-4)


def test_gpt_oss_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    folder, _ = tiny_architectures.write(tmp_path, VARIANTS["gpt_oss"])
    words = r"source \(gpt_oss\) needs: an activation other than SiLU, attention sinks, biases of experts\."
    with pytest.raises(UserError, match=words):
        require(on_device(), ModelConfig.load(folder), folder)


def test_a_model_that_needs_more_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    folder, _ = tiny_architectures.write(tmp_path, VARIANTS["gemma2"])
    words = (
        r"the GPU back end lacks what source \(gemma2\) needs: norms after .*, an activation other than SiLU, .*capped"
    )
    with pytest.raises(UserError, match=words):
        require(on_device(), ModelConfig.load(folder), folder)
