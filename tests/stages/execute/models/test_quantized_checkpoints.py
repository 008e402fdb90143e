"""Converted checkpoints run on the CPU kernels, and on a GPU, as the formats that they have become."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver, settings
from tests.stages.prepare import checkpoints
from tests.stages.prepare.quantized import packers
from tests.stages.prepare.quantized.schemes import CASES

NAMES = {
    "gptq": "q4_0+bf16",
    "awq": "q4_1+bf16",
    "int8": "q8_0+bf16",
    "fp8, blocks": "bf16",
    "fp8, kept blocks": "fp8+bf16",
}
"""A case for each format, and the formats that execute tells."""
PROMPTS = [[5, 9, 200, 31, 7], [8, 100, 3]]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    model: Any = checkpoints.tiny("llama", num_hidden_layers=1, **CASES[name].shape)
    packers.save(root / "tiny", model, CASES[name].config, CASES[name].pack)
    return prepare(Settings(model=str(root / "tiny"), cache_dir=str(root / "cache")))


def test_the_native_kernels_are_close_to_float32(name: str, folder: Path) -> None:
    exact, native = Driver(folder, settings()), Driver(folder, settings(dtype="bfloat16", max_num_seqs=2))
    assert isinstance(native.runner.program, NativeProgram)
    assert set(native.runner.weight_formats.split("+")) == set(NAMES[name].split("+"))
    for driver in (exact, native):
        driver.generate(PROMPTS, 1)
    expected, ours = exact.logits(), native.logits()
    error = np.sqrt(np.square(ours - expected).mean()) / expected.std()
    assert error < 0.03, "a wrong scale or zero point makes it larger by far"


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter
def test_the_gpu_kernels_give_the_outputs_of_torch(name: str, folder: Path) -> None:
    config = on_device(max_num_seqs=2)
    expected, ours = Driver(folder, on_cpu(config)), CudaDriver(folder, config)
    assert ours.generate(PROMPTS, 2) == expected.generate(PROMPTS, 2)
    np.testing.assert_allclose(ours.logits()[:2], expected.logits(), atol=1e-4)
    floats = {"bf16": "f32"}  # on_device computes in float32
    assert set(ours.runner.weight_formats.split("+")) == {floats.get(each, each) for each in NAMES[name].split("+")}
