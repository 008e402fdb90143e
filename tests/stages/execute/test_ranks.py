"""Tensor parallelism: several ranks compute the same numbers, bit by bit, as one."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.share import possible, share_of
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.driver import Driver
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write
from tests.stages.execute.rank_driver import RankDriver
from tests.stages.execute.test_native import GROUPED_SHAPE, SUPER_BLOCK_SHAPE

ALL = bool(os.environ.get("PIPELINE_ALL_RANKS"))
"""Every architecture and instruction set, which takes some minutes."""

UNEVEN = {"num_heads": 6, "num_kv_heads": 3, "vocab_size": 299, "hidden_size": 72, "intermediate_size": 136}
SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 + 1 KV heads": (2, UNEVEN),
    "a KV head each": (3, UNEVEN),
    "two ranks have the same KV head": (6, UNEVEN),
    "uneven parts of a KV head": (2, {"num_heads": 7, "num_kv_heads": 1, "head_dim": 32, "hidden_size": 56}),
    "norms of heads, a window": (
        2,
        {"architecture": "qwen3", "qk_norm": True, "head_dim": 32, "sliding_window": 9, "sliding_layers": [0, 2]},
    ),
    "biases": (2, {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True}),
    "more ranks than panels": (6, {"num_kv_heads": 6, "intermediate_size": 64, "hidden_size": 48}),
}
FORMATS: dict[str, tuple[list[Format], dict[str, Any]]] = {
    "q8_0": (["q8_0"], GROUPED_SHAPE),
    "q4_0": (["q4_0"], GROUPED_SHAPE),
    "q4_1": (["q4_1"], GROUPED_SHAPE),
    "mixed": (["q4_0", "bf16", "q8_0", "q4_1", "q4_0"], GROUPED_SHAPE),
    "fp8": (["fp8", "fp8", "q4_0", "fp8", "bf16"], SUPER_BLOCK_SHAPE),
    "k-quants": (["q4_k", "q6_k", "q5_k", "q5_0", "q8_0", "q5_1", "q6_k", "q4_k"], SUPER_BLOCK_SHAPE),
}
ARCHITECTURES = (
    *("gemma3", "olmo2", "gpt2", "falcon 7b", "mpt", "bloom", "cohere", "phi", "stablelm, parallel"),
    *("qwen2_moe", "gpt_oss", "granite", "nemotron"),
)


def numbers(driver: Driver, length: int = 50) -> list[np.ndarray]:
    """The logits of a prompt in chunks beside one that decodes, and of both decoding."""
    driver.clear()
    made: list[np.ndarray] = []
    keep = driver.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = keep(*args, **kwargs)
        made.append(driver.logits())
        return result

    driver.step = step  # type: ignore[method-assign]
    driver.generate([random_ids(length, 1), random_ids(9, 2), random_ids(33, 3)], 4, chunk=[17, None, None])
    driver.step = keep  # type: ignore[method-assign]
    return made


def compare(folder: Path, isa: str, num_ranks: int, **how: Any) -> None:
    one = Native(folder, isa, True, **how)
    expected = numbers(one)
    one.runner.close()
    several = RankDriver(folder, isa, num_ranks, **how)
    found = numbers(several)
    several.ranks.close()
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_any_shape(tmp_path: Path, shape: str) -> None:
    num_ranks, changes = SHAPES[shape]
    write(tmp_path, checkpoints.config_of(**changes))
    compare(tmp_path, ISAS[0], num_ranks, kv_mib=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_logits_of_any_format(tmp_path: Path, format: str, isa: str) -> None:
    if isa != ISAS[0] and format not in ("mixed", "k-quants") and not ALL:
        isa = ISAS[0]
    formats, changes = FORMATS[format]
    write(tmp_path, checkpoints.config_of(**changes), formats)
    compare(tmp_path, isa, 2, kv_mib=2)


@pytest.mark.parametrize("name", tiny_architectures.VARIANTS if ALL else ARCHITECTURES)
def test_logits_of_any_architecture(tmp_path: Path, name: str) -> None:
    variant = tiny_architectures.VARIANTS[name]
    folder, _ = tiny_architectures.write(tmp_path, variant)
    if ModelConfig.load(folder).head_dim % 16:
        pytest.fail(f"the library can't compute {name}")
    compare(folder, ISAS[0], 2, kv_mib=2, max_model_len=variant.max_model_len)


def test_logits_with_an_int8_kv_cache(tmp_path: Path) -> None:
    """The means of keys are measured by all ranks together, when they load."""
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    compare(tmp_path, ISAS[0], 2, kv_mib=2, kv_dtype="int8")


def test_several_threads_in_each_rank(tmp_path: Path) -> None:
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    compare(tmp_path, ISAS[0], 2, kv_mib=2, threads=2)


def test_shares_cover_everything_once() -> None:
    config = checkpoints.config_of(**UNEVEN)
    for num in (1, 2, 3):
        shares = [share_of(config, rank, num) for rank in range(num)]
        for name, size in (("heads", 6), ("kv_heads", 3), ("hidden", 72), ("inner", 136), ("vocab", 299)):
            assert [i for share in shares for i in getattr(share, name)] == list(range(size))
        assert all(len(share.heads) == 2 * len(share.kv_heads) for share in shares)
    assert [len(share_of(config, rank, 2).kv_heads) for rank in range(2)] == [2, 1]


def test_ranks_share_kv_heads_if_there_are_more_of_them() -> None:
    config = checkpoints.config_of(num_heads=9, num_kv_heads=3)
    shares = [share_of(config, rank, 6) for rank in range(6)]
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [1], [1], [2], [2]]
    assert [len(share.heads) for share in shares] == [2, 1] * 3
    assert [i for share in shares for i in share.heads] == list(range(9))


def test_a_number_of_ranks_that_kv_heads_cannot_be_dealt_to_is_refused() -> None:
    config = checkpoints.config_of(num_heads=6, num_kv_heads=3)
    assert possible(config) == [1, 2, 3, 6]
    with pytest.raises(UserError) as info:
        share_of(config, 0, 4)
    assert str(info.value) == (
        "execute.tensor_parallel: 4 ranks, but the model has 3 KV heads: choose 1, 2, 3 or 6"
    )
