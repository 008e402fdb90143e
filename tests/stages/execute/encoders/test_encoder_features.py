"""What encoders share with models that generate text: ranks, and LoRA adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pipeline.config.settings import LoraSettings
from pipeline.lora.convert import convert
from tests.stages.execute.adapters.test_lora import with_lora
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.test_encoders import MAX_ERROR, reference
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, Texts, random_ids, write
from tests.stages.execute.native_driver import ISAS
from tests.stages.execute.rank_driver import RankDriver

TEXTS = [random_ids(num, num) for num in (40, 1, 126)]


@pytest.mark.parametrize("name", ["bert, sequence", "nomic_bert", "gemma3, bidirectional"])
def test_ranks_have_the_bits_of_one(tmp_path: Path, name: str) -> None:
    folder, _ = write(tmp_path, VARIANTS[name])
    found = []
    for ranks, stages in ((1, 1), (2, 1), (1, 2)):
        driver = RankDriver(folder, ISAS[0], ranks, num_stages=stages, kv_mib=2, tokens=256)
        try:
            found.append(Texts(folder, driver=driver).compute(TEXTS))
        finally:
            driver.ranks.close()
    for ours in found[1:]:
        for one, other in zip(ours, found[0], strict=True):
            np.testing.assert_array_equal(one, other)


MODULES = {"query": (64, 64), "value": (64, 64), "output.dense": (64, 96), "intermediate.dense": (96, 64)}


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_adapter_of_an_encoder_equals_the_merged_model(tmp_path: Path, prefix: str) -> None:
    """With PEFT's names of modules, as of an adapter of BertModel and of a class with a head."""
    variant = VARIANTS["bert, sequence" if prefix else "bert"]
    folder, model = write(tmp_path, variant)
    random, tensors, weights = np.random.default_rng(0), {}, model.state_dict()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        target = next((end for end in MODULES if module.endswith(f".{end}")), None)
        if target is None or ".layer." not in name or not name.endswith(".weight") or "attention.output" in name:
            continue
        outputs, inputs = weight.shape
        a, b = (random.normal(0, 0.3, shape).astype("f4") for shape in ((4, inputs), (outputs, 4)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        weight += 2 * torch.from_numpy(b @ a)
    assert len(tensors) == 2 * 4 * 3 and all(f"model.{prefix}encoder" in name for name in tensors)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(MODULES)}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    adapter_id = convert(adapter, folder, "f32", 16)
    texts = Texts(
        folder,
        with_lora(
            settings(kernels="torch", kv_mib=2, tokens=256),
            LoraSettings(runtime_loading=True, max_loras=1, max_lora_rank=16),
        ),
    )
    plain, adapted = texts.compute([TEXTS[0], TEXTS[0]], adapter_ids=["", adapter_id])
    model.load_state_dict(weights)
    merged = reference(variant, model, TEXTS[0])
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=MAX_ERROR)
    assert abs(plain - merged).max() > 100 * MAX_ERROR
