"""Mixtures of experts in the CPU library: near torch in every format, and the same bits for any chunks and batches."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.prepare.weights.tensors import expected_shapes
from tests.k_quants import quantize
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.native_driver import ISAS, Native

MAX_ERROR = 0.05
"""Relative to the standard deviation of the logits. A layer that computes something else has tens of percent."""
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "head_dim": 32}
FORMATS: dict[str, dict[str, Format]] = {
    "bf16": {},
    "q8_0": {"experts": "q8_0"},
    "q4_1": {"experts": "q4_1", "shared": "q4_1"},
    "fp8": {"experts": "fp8"},
    "k-quants": {"gate_proj": "q4_k", "up_proj": "q4_k", "down_proj": "q6_k", "shared": "q5_k"},
    "gate and up apart": {"gate_proj": "q4_k", "up_proj": "q8_0", "down_proj": "q5_k"},
    "experts apart": {"experts.2.": "q4_0", "experts.3.": "q8_0"},
}
"""By a part of the tensors' names, the last one that fits; other matrices are bf16."""

ON_EVERY_ISA = ("bf16", "k-quants", "gate and up apart")
"""Between them they have all kinds of matmuls. Each op is tested in every format elsewhere."""
CASES = [(isa, name) for isa in ISAS for name in FORMATS if isa == ISAS[0] or name in ON_EVERY_ISA]


def config_of(**changes: Any) -> ModelConfig:
    experts = Experts(
        num=6,
        num_per_token=2,
        intermediate_size=256,
        shared_intermediate_size=256,
        shared_gate=True,
        layers=[0, 2],
    )
    return checkpoints.config_of(**{**SHAPE, "experts": msgspec.structs.replace(experts, **changes)})


def write(folder: Path, config: ModelConfig, formats_of: dict[str, Format]) -> Path:
    """A random model whose matrices are in these formats."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    tensors, formats = {}, {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(*shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = values * 0.1 + ("norm" in name)
            continue
        values *= 1.5 * shape[1] ** -0.5
        format: Format = next((format for part, format in reversed(formats_of.items()) if part in name), "bf16")
        tensors[name] = quantize(values, format).data
        if format != "bf16":
            formats[format_key(name)] = format
    save_file(tensors, folder / "model.safetensors", formats)
    config.save(folder)
    return folder


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num).tolist()


PROMPTS = [random_ids(60, 1), random_ids(47, 2), random_ids(33, 3)]


class Rows:
    """Computes parts of prompts in new rows, each prompt in its own blocks."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self._taken = driver, 0
        self._blocks = [driver.take_blocks(80) for _ in PROMPTS]

    def logits(self, *entries: tuple[int, int, int, bool]) -> list[np.ndarray]:
        """Logits of entries (prompt, start, count, whether to sample)."""
        rows = [((self._taken + i) % 8, *entry) for i, entry in enumerate(entries)]
        self._taken += len(rows)
        adds = [row_add(row, PROMPTS[which], self._blocks[which]) for row, which, *_ in rows]
        self.driver.step([(row, start, count, samples) for row, _, start, count, samples in rows], adds=adds)
        found = list(self.driver.logits())
        self.driver.step(drops=[row for row, *_ in rows])
        return found


@pytest.mark.parametrize(("isa", "name"), CASES)
def test_a_token_has_the_same_bits_in_any_step(tmp_path: Path, name: str, isa: str) -> None:
    """Alone, in chunks, in a batch of prompts, and decoding beside others."""
    folder = write(tmp_path / "tiny", config_of(), FORMATS[name])
    rows = Rows(Native(folder, isa, kv_mib=2, tokens=256))
    wholes = [rows.logits((i, 0, len(prompt), True))[0] for i, prompt in enumerate(PROMPTS)]
    assert all(np.isfinite(logits).all() and logits.std() > 0.1 for logits in wholes)
    together = rows.logits(*((i, 0, len(prompt), True) for i, prompt in enumerate(PROMPTS)))
    np.testing.assert_array_equal(together, wholes)
    rows.logits((0, 0, 21, False), (1, 0, 46, False))
    np.testing.assert_array_equal(rows.logits((0, 21, 39, True), (2, 0, 33, True)), [wholes[0], wholes[2]])
    decoded = rows.logits(*((i, len(prompt) - 1, 1, True) for i, prompt in enumerate(PROMPTS)))
    np.testing.assert_array_equal(decoded, wholes)
    np.testing.assert_array_equal(rows.logits((1, 46, 1, True))[0], wholes[1])
    rows.driver.runner.close()


@pytest.mark.parametrize(("isa", "name"), CASES)
def test_logits_are_near_those_of_torch(tmp_path: Path, name: str, isa: str) -> None:
    """All experts compute each token, so that rounding errors can't change which do."""
    folder = write(tmp_path / "tiny", config_of(num_per_token=6), FORMATS[name])
    torch_rows = Rows(Driver(folder, settings(kernels="torch", kv_mib=2, tokens=256)))
    native_rows = Rows(Native(folder, isa, kv_mib=2, tokens=256))
    entries = [(i, 0, len(prompt), True) for i, prompt in enumerate(PROMPTS)]
    expected, found = torch_rows.logits(*entries), native_rows.logits(*entries)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < MAX_ERROR * theirs.std()
    native_rows.driver.runner.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring": "sigmoid", "selection_bias": True, "normalized": True, "scale": 1.5},
        {"bias": True, "router_bias": True, "shared_gate": False, "normalized": True},
        {"shared_intermediate_size": 0, "shared_gate": False, "layers": None},
    ],
    ids=["sigmoid", "biases", "no shared expert"],
)
def test_other_forms_of_routers_and_experts(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write(tmp_path / "tiny", config_of(num_per_token=6, **changes), {})
    entries = [(i, 0, len(prompt), True) for i, prompt in enumerate(PROMPTS)]
    expected = Rows(Driver(folder, settings(kernels="torch", kv_mib=2, tokens=256))).logits(*entries)
    rows = Rows(Native(folder, ISAS[0], kv_mib=2, tokens=256))
    for ours, theirs in zip(rows.logits(*entries), expected, strict=True):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < MAX_ERROR * theirs.std()
    rows.driver.runner.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_sinks_with_keys_and_values_in_8_bits(tmp_path: Path, kv_dtype: str) -> None:
    config = msgspec.structs.replace(config_of(num_per_token=6), sinks=True, sliding_window=21, sliding_layers=[0])
    folder = write(tmp_path / "tiny", config, {})
    entries = [(i, 0, len(prompt), True) for i, prompt in enumerate(PROMPTS)]
    expected = Rows(Driver(folder, settings(kernels="torch", kv_mib=2, tokens=256, kv_dtype=kv_dtype))).logits(*entries)
    rows = Rows(Native(folder, ISAS[0], kv_mib=2, tokens=256, kv_dtype=kv_dtype))
    found = rows.logits(*entries)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < MAX_ERROR * theirs.std()
    np.testing.assert_array_equal(rows.logits((0, 59, 1, True))[0], found[0])
    rows.driver.runner.close()
