"""The launch of a product comes from a table if it has an entry, else from a rule that fits any shape."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.kernels.triton.gemm import fused, tuned
from pipeline.kernels.triton.gemm.tuned import BUCKETS, SKINNY_TOKENS, GemmConfig, GemmShape, Op

CPU = torch.device("cpu")
FORMATS = ("bf16", "f32", "int8g128", "int4g128", "int4g32", "int5g32", "q4_k", "q5_k", "q6_k", "fp8g128")
SIZES = ((960, 576), (576, 1536), (49152, 576), (3072, 2048), (4096, 14336), (128256, 4096), (70, 96), (3, 5))
H100 = 132


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.forget()
    yield tmp_path
    tuned.forget()


def test_a_table_entry_is_used_and_its_neighbours_follow_the_rule(folder: Path) -> None:
    config = GemmConfig(8, 32, 256, 2, 8, 5)
    path = tuned.write_table(folder, "none", {GemmShape("linear", 8, 960, 512, "bf16"): config}, "a machine")
    assert path.parent == folder
    assert json.loads(path.read_text())["measured_on"] == "a machine"
    sizes: dict[str, Any] = {"num_rows": 960, "num_columns": 512, "device": CPU}
    assert tuned.choose("linear", num_tokens=5, format="bf16", **sizes) == config
    others: tuple[tuple[tuned.Op, int, str], ...] = (("linear", 9, "bf16"), ("linear", 5, "f32"), ("logits", 5, "bf16"))
    for op, num_tokens, format in others:
        assert tuned.choose(op, num_tokens=num_tokens, format=format, **sizes) != config


def test_shipped_tables_are_valid() -> None:
    paths = list(tuned.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        for shape in tuned.table(path.stem):
            assert shape.num_tokens in BUCKETS


@pytest.mark.parametrize("op", ["linear", "swiglu", "logits"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", BUCKETS)
def test_the_rule_divides_any_shape(op: Op, format: str, num_tokens: int) -> None:
    for num_rows, num_columns in SIZES:
        shape = GemmShape(op, num_tokens, num_rows, num_columns, format)
        config = tuned.rule(shape, H100)
        num_blocks = -(-num_columns // config.block_k)
        share = -(-num_blocks // config.split)
        assert (config.split - 1) * share < num_blocks  # no share is empty
        assert config.split == 1 or (op == "linear" and num_tokens <= SKINNY_TOKENS)
        assert config.block_k % max(1, tuned.group_of(format)) == 0
        assert config.block_m == 1 if num_tokens == 1 else config.block_m >= max(8, num_tokens)
        for number in (config.block_m, config.block_n, config.block_k):
            assert number & (number - 1) == 0


@pytest.mark.parametrize(("num_rows", "num_columns"), [(960, 576), (3072, 2048), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("num_tokens", [1, 8, 16])
def test_most_of_a_gpu_is_busy(num_rows: int, num_columns: int, num_tokens: int) -> None:
    config = tuned.rule(GemmShape("linear", num_tokens, num_rows, num_columns, "bf16"), H100)
    assert -(-num_rows // config.block_n) * config.split >= H100


def test_a_format_has_bits_and_a_group() -> None:
    for format, bits, group in (("bf16", 16, 0), ("int8g128", 8, 128), ("int5g32", 5, 32), ("q6_k", 6, 32)):
        assert (tuned.bytes_of_columns(format, 256), tuned.group_of(format)) == (32 * bits, group)
        assert tuned.has_codes(format) == (group > 0)
    assert tuned.bytes_of_columns("fp8g128", 256) == 256


@pytest.mark.parametrize("num_tokens", [1, 8, 128])
@pytest.mark.parametrize("format", ["bf16", "int4g128", "q4_k", "q6_k"])
def test_candidates_are_many_and_distinct(num_tokens: int, format: str) -> None:
    sizes: dict[str, Any] = {
        "num_tokens": num_tokens,
        "num_rows": 6144,
        "num_columns": 4096,
        "format": format,
        "device": CPU,
    }
    found = list(tuned.candidates("linear", **sizes))
    assert found[0] == tuned.choose("linear", **sizes)
    assert 8 < len(found) == len(set(found))


def test_a_norm_is_fused_if_it_is_small() -> None:
    small, large = tuned.rule(GemmShape("linear", 1, 960, 576, "bf16"), H100), 4096
    assert fused.fuses(1, 1, 576, -(-960 // small.block_n) * small.split)
    assert not fused.fuses(16, 4, large, 400)
    assert not fused.fuses(17, 0, 64, 1)
