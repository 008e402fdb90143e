"""The precision of activations for 4-bit weights: int12 gives the results of the weights, int8 gives them roughly."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.kernels.stored_matrix import Format
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import Driver, settings
from tests.stages.execute.native_driver import ISAS, emulation, random_ids, write


def logits(folder: Path, isa: str, activations: str) -> np.ndarray:
    """Of the last token of a prompt, [vocab_size]."""
    with emulation(isa) as kernels:
        config = settings(dtype="float32" if kernels == "torch" else "bfloat16", kernels=kernels, threads=2)
        execute = msgspec.structs.replace(config.execute, activations=activations)
        driver = object.__new__(Driver)
        driver.runner = CpuRunner(msgspec.structs.replace(config, execute=execute), folder)
    driver.runner.program.keep_logits()
    driver._budget = 128
    driver.clear()
    driver.generate([random_ids(40, 0)], 1)
    found = driver.logits()[0]
    driver.runner.close()
    return found


@pytest.mark.parametrize("format", ["q4_0", "q4_1"])
@pytest.mark.parametrize("isa", ISAS)
def test_int12_is_nearer_to_the_weights_than_int8(tmp_path: Path, isa: str, format: Format) -> None:
    """What is left of the error with int12 is that of bfloat16 keys and values."""
    write(tmp_path, checkpoints.config_of(hidden_size=96, intermediate_size=160), (format,))
    exact = logits(tmp_path, "torch", "int12")
    errors = {each: np.abs(logits(tmp_path, isa, each) - exact).max() for each in ("int12", "int8")}
    assert 0 < errors["int12"] < 0.5 * errors["int8"]
