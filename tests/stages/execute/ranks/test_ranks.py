"""Tensor parallelism: several ranks compute the same numbers, bit by bit, as one."""

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.ranks.context import RankLateError, StepAbandonedError
from pipeline.stages.execute.ranks.share import possible, share_of
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.cpu.native_models import GROUPED_SHAPE, SUPER_BLOCK_SHAPE
from tests.stages.execute.driver import Driver, make_step, row_add, take
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write
from tests.stages.execute.rank_driver import RankDriver

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
FORMATS_AND_ISAS = [
    (format, isa) for format in FORMATS for isa in ISAS if isa == ISAS[0] or format in ("mixed", "k-quants") or ALL
]
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


def compare(folder: Path, isa: str, num_ranks: int, num_stages: int = 1, **how: Any) -> None:
    layers = how.pop("layers", ())
    one = Native(folder, isa, True, **how)
    expected = numbers(one)
    one.runner.close()
    several = RankDriver(folder, isa, num_ranks, num_stages=num_stages, layers=layers, **how)
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


@pytest.mark.parametrize(("format", "isa"), FORMATS_AND_ISAS)
def test_logits_of_any_format(tmp_path: Path, format: str, isa: str) -> None:
    formats, changes = FORMATS[format]
    write(tmp_path, checkpoints.config_of(**changes), formats)
    compare(tmp_path, isa, 2, kv_mib=2)


@pytest.mark.parametrize("name", tiny_architectures.EQUAL_LAYERS if ALL else ARCHITECTURES)
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
    assert str(info.value) == ("execute.tensor_parallel: 4 ranks, but the model has 3 KV heads: choose 1, 2, 3 or 6")


def by_hand(driver: RankDriver, rank: int, incarnation: int, step_id: int) -> bool:
    """A rank begins a step, and does nothing else."""
    group = driver.ranks.ranks[rank]._ranks
    assert group is not None
    return group.begin(incarnation, step_id)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[RankDriver]:
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    driver = RankDriver(tmp_path, ISAS[0], 2, kv_mib=2, timeout_s=0.3)
    yield driver
    driver.ranks.close()


def test_a_rank_that_has_not_begun_a_step_is_named(two: RankDriver) -> None:
    with pytest.raises(RankLateError, match=r"^execute\.1 stood at the end of the step before, step 7, for 0\.3 s"):
        by_hand(two, 0, 1, 7)


def test_a_rank_that_does_not_come_to_a_barrier_is_named(two: RankDriver) -> None:
    runner = two.ranks.ranks[0]
    step = make_step([(0, 0, 4, True)], adds=[row_add(0, [5, 6, 7, 8], [0])], step_id=8)
    with ThreadPoolExecutor(1) as other:
        begun = other.submit(by_hand, two, 1, 1, 8)
        with pytest.raises(RankLateError, match=r"^execute\.1 stood at embed, step 8, for 0\.3 s"):
            runner.step(step, take)
        assert begun.result()


def test_a_rank_that_waits_for_masks_is_not_late(two: RankDriver) -> None:
    group = two.ranks.ranks[0]._ranks
    assert group is not None
    with ThreadPoolExecutor(1) as other:
        with group.busy():
            waiting = other.submit(by_hand, two, 1, 1, 1)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.0)  # three times as long as the barrier's deadline
        assert by_hand(two, 0, 1, 1) and waiting.result()


def test_rank_0_is_named_if_it_publishes_no_ids(two: RankDriver) -> None:
    group = two.ranks.ranks[1]._ranks
    assert group is not None
    with pytest.raises(RankLateError, match=r"^execute\.0 stood at sampling, step 0"):
        group.await_outcome()


def test_a_step_that_not_all_ranks_get_is_abandoned_when_its_scheduler_has_died(two: RankDriver) -> None:
    """Rank 1 has the last step of scheduler 1 and rank 0 has not; both learn of scheduler 2, one after the other."""
    step = make_step([(0, 0, 4, True)], adds=[row_add(0, [5, 6, 7, 8], [0])], step_id=9)
    first, second = two.ranks.ranks
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(second.step, step, take)
        first.drop_all(2)
        with pytest.raises(StepAbandonedError):
            waiting.result()
    second.drop_all(2)
    assert not second.rows.taken.any(), "the step was abandoned, so its rows were never added"
    again = msgspec.structs.replace(step, incarnation=2, step_id=1)
    assert len(two.runner.step(again, take).ids) == 1


def test_a_rank_reads_only_its_share_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight file is mapped, and packing a matrix is what reads it."""
    write(tmp_path, checkpoints.config_of(**GROUPED_SHAPE), ["bf16", "q8_0", "bf16"])
    pack, read = NativeMemory.pack, defaultdict[int, list[np.ndarray]](list)

    def packed(memory: NativeMemory, matrices: Any, order: Any = None, bias: Any = None) -> Any:
        rows = np.concatenate([matrix.row_addresses() for matrix in matrices])
        read[id(memory)].append(rows if order is None else rows[order[order >= 0]])
        return pack(memory, matrices, order, bias)

    def rows_of_each(num_ranks: int) -> list[int]:
        """How many rows of all matrices each rank has read."""
        read.clear()
        driver = RankDriver(tmp_path, ISAS[0], num_ranks) if num_ranks > 1 else Native(tmp_path, ISAS[0])
        driver.runner.close()
        counts = [np.concatenate(parts) for parts in read.values()]
        assert all(len(np.unique(addresses)) == len(addresses) for addresses in counts)
        return [len(addresses) for addresses in counts]

    monkeypatch.setattr(NativeMemory, "pack", packed)
    (total,) = rows_of_each(1)
    parts = rows_of_each(2)
    assert sum(parts) == total and max(parts) < 0.6 * total
