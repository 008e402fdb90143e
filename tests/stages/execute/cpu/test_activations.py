"""The precision of activations before weights of 4 to 6 bits: int12 gives the results of the weights, int8 gives them
roughly, and auto takes one of them for each format."""

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from pipeline.kernels.cpu.isa import Isa
from pipeline.kernels.stored_matrix import Format
from pipeline.stages.execute.cpu import precision
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.cpu.native_models import SUPER_BLOCK_SHAPE
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("formats", [("q4_k", "q4_k", "q4_k", "q6_k"), ("q6_k", "q6_k", "q6_k", "q5_k"), ("q8_0",)])
def test_auto_has_8_bits_if_most_weights_have_at_most_five(
    tmp_path: Path, isa: str, formats: tuple[Format, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the numbers of what it chooses. AMX multiplies 12 bits as fast."""
    monkeypatch.setattr(precision, "LEAST_BYTES", 1)
    write(tmp_path, checkpoints.config_of(**SUPER_BLOCK_SHAPE), formats)
    chosen = "int8" if formats[0] == "q4_k" and "amx" not in isa else "int12"
    assert np.array_equal(logits(tmp_path, isa, "auto"), logits(tmp_path, isa, chosen))


@pytest.mark.parametrize(
    ("setting", "isa", "megabytes", "chosen"),
    [
        ("auto", "avx2", {"q4_1": 220, "q6_k": 10, "q8_0": 900}, "int8"),
        ("auto", "neon", {"q4_k": 200, "q5_0": 200, "q6_k": 300}, "int8"),
        ("auto", "avx512", {"q4_k": 120, "q6_k": 80}, "int8"),
        ("auto", "avx512", {"q4_1": 90, "q8_0": 900}, "int12"),
        ("auto", "amx", {"q4_1": 400}, "int12"),
        ("auto", "avx512", {"q6_k": 400, "q4_k": 300}, "int12"),
        ("auto", "avx512", {"q8_0": 900}, "int12"),
        ("auto", "avx512", {}, "int12"),
        ("int12", "avx2", {"q4_1": 900}, "int12"),
        ("int8", "amx", {"q6_k": 20}, "int8"),
    ],
)
def test_the_weights_choose_the_precision(
    setting: Literal["auto", "int12", "int8"], isa: Isa, megabytes: dict[str, int], chosen: str
) -> None:
    sizes = {format: 1_000_000 * size for format, size in megabytes.items()}
    assert precision.choose_activations(setting, sizes, isa) == chosen
