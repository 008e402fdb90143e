"""LoRA adapters on a GPU: the same as the CPU computes, alone and in a batch, beside rows without adapters."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import LoraSettings, Settings
from pipeline.lora.convert import convert
from pipeline.runtime.model.model_config import ModelConfig
from tests.lora.random_adapters import merge, write_adapter
from tests.stages.execute import checkpoints
from tests.stages.execute.adapters.test_lora import LoraDriver, LoraRows
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver
from tests.stages.execute.native_driver import random_ids

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

IDS = random_ids(11, 5)
LORA = LoraSettings(runtime_loading=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8)


class OnGpu(CudaDriver, LoraRows):
    """On a GPU."""


def with_lora(config: Settings) -> Settings:
    return msgspec.structs.replace(config, lora=LORA)


@pytest.fixture(scope="module")
def ids_of(slight_dir: Path) -> list[str]:
    config = ModelConfig.load(slight_dir)
    variants: list[dict[str, Any]] = [
        {"rank": 8},
        {"rank": 3, "targets": ("k_proj", "up_proj")},
        {"rank": 5, "use_rslora": True},
    ]
    return [
        convert(write_adapter(slight_dir / f"peft{i}", config, seed=i, **fields), slight_dir, "f32", 8)
        for i, fields in enumerate(variants)
    ]


def test_logits_are_those_of_the_cpu_and_of_the_merged_model(slight_dir: Path, ids_of: list[str]) -> None:
    """Prompts in chunks, so that steps have several tokens of a row, and one, and rows of any adapter."""
    config = on_device()
    ours, theirs = OnGpu(slight_dir, with_lora(config)), LoraDriver(slight_dir, with_lora(on_cpu(config)))
    rows = [(IDS, ""), (IDS, ids_of[0]), (IDS[:-3], ids_of[1])]
    expected = theirs.last_logits(rows, 4)
    assert len({logits.tobytes() for logits in expected}) == 3
    made = ours.last_logits(rows, 4)
    assert np.abs(made - expected).max() <= 1e-4
    # More adapters than slots, and every row decodes.
    others = [(IDS[:4], ids_of[2]), (IDS[:4], ids_of[0])]
    assert np.abs(ours.last_logits(others, 1) - theirs.last_logits(others, 1)).max() <= 1e-4
    plain = Driver(slight_dir, on_cpu(config))
    plain.generate([IDS], 1)
    assert np.abs(ours.last_logits([(IDS, "")])[0] - plain.logits()[0]).max() <= 1e-4
    model = merge(_model(slight_dir), ModelConfig.load(slight_dir), slight_dir / "peft0")
    merged = checkpoints.reference_logits(model, IDS)[-1].numpy()
    assert np.abs(made[1] - merged).max() <= 1e-4


def _model(folder: Path) -> object:
    from safetensors.torch import load_file

    model = checkpoints.reference_model(ModelConfig.load(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


def test_steps_without_adapters_are_other_graphs(slight_dir: Path, ids_of: list[str]) -> None:
    """So rows of a server with adapters cost nothing more, and which adapter a row has captures nothing."""
    driver, ids = OnGpu(slight_dir, with_lora(on_device())), IDS[:2]
    driver.last_logits([(ids, "")], 1)
    assert not any(shape.has_adapters for shape, _ in driver.runner.step_graphs._captured)
    driver.last_logits([(ids, ids_of[0])], 1)
    num = driver.runner.step_graphs.num_captured
    driver.last_logits([(ids, ids_of[1])], 1)
    assert driver.runner.step_graphs.num_captured == num
