"""Pipeline parallelism: stages compute the same numbers, bit by bit, as one process."""

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.sections.stages import ExecuteSettings
from pipeline.errors import UserError
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.kv_groups import kv_layout
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.ranks.context import RankLateError, StepAbandonedError
from pipeline.stages.execute.ranks.layer_split import balanced, kv_layout_of, split
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.cpu.native_models import GROUPED_SHAPE
from tests.stages.execute.driver import make_step, row_add, take
from tests.stages.execute.native_driver import ISAS, Native, write
from tests.stages.execute.rank_driver import RankDriver
from tests.stages.execute.ranks.test_ranks import UNEVEN, compare

ALL = bool(os.environ.get("PIPELINE_ALL_RANKS"))
"""Every architecture, format and instruction set, which takes some minutes."""

SHAPES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "three stages": (1, (1, 1, 1), UNEVEN),
    "two ranks in each stage": (2, (2, 1), UNEVEN),
    "a tied head, windows": (
        1,
        (1, 2),
        {
            "architecture": "qwen3",
            "qk_norm": True,
            "head_dim": 32,
            "tie_embeddings": True,
            "sliding_window": 9,
            "sliding_layers": [0, 2],
        },
    ),
}
FORMATS: list[list[Format]] = [["q8_0"], ["q4_0"], ["q4_1"], ["q4_0", "bf16", "q8_0", "q4_1", "q4_0"]]
ARCHITECTURES = ("gpt2", "gemma3")
"""Learned positions; two kinds of layers."""


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_any_shape(tmp_path: Path, shape: str) -> None:
    num_ranks, layers, changes = SHAPES[shape]
    write(tmp_path, checkpoints.config_of(**changes))
    compare(tmp_path, ISAS[0], num_ranks, len(layers), kv_mib=2, layers=layers)


@pytest.mark.parametrize(
    ("formats", "isa"),
    [(formats, isa) for formats in FORMATS for isa in ISAS if ALL or (formats, isa) == (["q4_1"], ISAS[0])],
)
def test_logits_of_any_format(tmp_path: Path, formats: list[Format], isa: str) -> None:
    write(tmp_path, checkpoints.config_of(**GROUPED_SHAPE), formats)
    compare(tmp_path, isa, 1, 2, kv_mib=2)


@pytest.mark.parametrize("name", tiny_architectures.EQUAL_LAYERS if ALL else ARCHITECTURES)
def test_logits_of_any_architecture(tmp_path: Path, name: str) -> None:
    variant = tiny_architectures.VARIANTS[name]
    folder, _ = tiny_architectures.write(tmp_path, variant)
    compare(folder, ISAS[0], 1, 2, kv_mib=2, max_model_len=variant.max_model_len)


def test_logits_with_an_int8_kv_cache(tmp_path: Path) -> None:
    """The means of keys are measured when the stages load, one after the other."""
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    compare(tmp_path, ISAS[0], 1, 2, kv_mib=2, kv_dtype="int8")


def test_stages_read_about_as_many_bytes_each() -> None:
    assert balanced([7] * 30, 57, 2) == [19, 11]  # SmolLM2: the head weighs as much as eight layers
    assert balanced([7] * 30, 0, 3) == [10, 10, 10]
    assert balanced([1, 1, 1], 50, 3) == [1, 1, 1]
    assert balanced([9, 1, 1, 1], 0, 2) == [1, 3]
    assert balanced([5], 1, 1) == [1]


def test_the_layers_of_each_stage_may_be_chosen() -> None:
    settings = ExecuteSettings(pipeline_parallel=3, pipeline_layers=(2, 1, 3))
    parts = split(settings, [1] * 6, 9)
    assert [part.layers for part in parts] == [range(2), range(2, 3), range(3, 6)]
    assert [(part.is_first, part.is_last) for part in parts] == [(True, False), (False, False), (False, True)]
    with pytest.raises(UserError, match=r"^execute\.pipeline_layers: 2 \+ 1 \+ 3 = 6 layers, but the model has 5$"):
        split(settings, [1] * 5, 9)
    with pytest.raises(UserError, match=r"^execute\.pipeline_parallel: 3 stages, but the model has 2 layers$"):
        split(settings, [1] * 2, 9)


def test_blocks_have_room_for_the_layers_of_a_stage() -> None:
    layout = kv_layout([None, 64, 64, None, 64, 64], 1000)
    (first, second) = split(ExecuteSettings(pipeline_parallel=2, pipeline_layers=(1, 5)), [1] * 6, 0)
    assert layout.layers_per_group == 2 and len(layout.groups) == 3
    assert kv_layout_of(layout, first).layers_per_group == 1 and kv_layout_of(layout, second).layers_per_group == 2
    assert kv_layout_of(layout, second).layer_locations == ((1, 0), (1, 1), (0, 0), (2, 0), (2, 1))


def test_a_stage_reads_only_the_weights_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight file is mapped, and packing a matrix is what reads it."""
    write(tmp_path, checkpoints.config_of(**GROUPED_SHAPE), ["bf16", "q8_0", "bf16"])
    pack, read = NativeMemory.pack, defaultdict[int, list[np.ndarray]](list)

    def packed(memory: NativeMemory, matrices: Any, order: Any = None, bias: Any = None) -> Any:
        rows = np.concatenate([matrix.row_addresses() for matrix in matrices])
        read[id(memory)].append(rows if order is None else rows[order[order >= 0]])
        return pack(memory, matrices, order, bias)

    def rows_of_each(num_stages: int) -> list[int]:
        read.clear()
        driver = RankDriver(tmp_path, ISAS[0], num_stages=num_stages) if num_stages > 1 else Native(tmp_path, ISAS[0])
        driver.runner.close()
        return [len(np.concatenate(parts)) for parts in read.values()]

    monkeypatch.setattr(NativeMemory, "pack", packed)
    (total,) = rows_of_each(1)
    parts = rows_of_each(2)
    assert sum(parts) == total and max(parts) < 0.8 * total


@pytest.fixture
def two(tmp_path: Path) -> Iterator[RankDriver]:
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    driver = RankDriver(tmp_path, ISAS[0], num_stages=2, kv_mib=2, timeout_s=0.3)
    yield driver
    driver.ranks.close()


BOARD_LINE = 128
"""Bytes of a rank's line."""
STEP = make_step([(0, 0, 4, True)], adds=[row_add(0, [5, 6, 7, 8], [0])], step_id=9)


def test_a_stage_that_has_not_begun_a_step_is_named(two: RankDriver) -> None:
    with pytest.raises(RankLateError, match=r"^execute\.0 stood at the end of the step before, step 9, for 0\.3 s"):
        two.ranks.ranks[1].step(STEP, take)


def test_a_stage_that_does_not_finish_a_step_is_named_with_its_layer(two: RankDriver) -> None:
    """The first stage waits for the ids of a step before, while the last one stands at a layer."""
    first, link = two.ranks.ranks[0], two.ranks.ranks[1]._link
    assert link is not None
    link.announce(1)
    first.step(STEP, take)
    at = BOARD_LINE + 16  # kernels/cpu/step_board.h: `at` of execute.1
    link._memory[at : at + 8].view(np.uint64)[:] = 8 << 48
    with pytest.raises(RankLateError, match=r"^execute\.1 stood at layer 7, step 10, for 0\.3 s"):
        first.step(make_step([(0, 4, 1, True)], step_id=10), take)


def test_a_stage_that_waits_for_another_one_is_not_late(two: RankDriver) -> None:
    """The last stage waits for the first one, and a third party for the last stage."""
    link = two.ranks.ranks[0]._link
    assert link is not None
    with ThreadPoolExecutor(1) as other:
        with link.busy():
            waiting = other.submit(two.ranks.ranks[1].step, STEP, take)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.0)  # three times as long as the deadline
        two.ranks.ranks[0].step(STEP, take)
        assert len(waiting.result().ids) == 1


@pytest.mark.parametrize("has_it", [0, 1])
def test_a_step_that_not_all_stages_get_is_abandoned_when_its_scheduler_has_died(two: RankDriver, has_it: int) -> None:
    """One stage has the last step of scheduler 1, the other has not; both learn of scheduler 2, one after the other."""
    one, other = two.ranks.ranks[has_it], two.ranks.ranks[1 - has_it]
    with ThreadPoolExecutor(1) as thread:
        computing = thread.submit(one.step, STEP, take)
        other.drop_all(2)
        if has_it:
            with pytest.raises(StepAbandonedError):
                computing.result()
        else:
            computing.result()  # it needs nothing of the last stage
    one.drop_all(2)
    for step_id in (1, 2):
        step = msgspec.structs.replace(STEP, incarnation=2, step_id=step_id, drops=b"" if step_id == 1 else _row_0())
        assert len(two.runner.step(step, take).ids) == 1


def _row_0() -> bytes:
    return np.zeros(1, np.int32).tobytes()


def ids_of(runner: CpuRunner, row: int) -> list[int]:
    return runner.rows.ids[row, : runner.rows.num_ids[row]].tolist()


def test_stages_learn_ids_when_they_need_them(two: RankDriver) -> None:
    first, last = two.ranks.ranks
    two.runner.step(STEP, take)
    assert len(ids_of(last, 0)) == 5 and len(ids_of(first, 0)) == 4
    two.runner.step(make_step([(0, 4, 1, True)], step_id=10), take)
    assert len(ids_of(last, 0)) == 6 and ids_of(first, 0) == ids_of(last, 0)[:5]
    # A row that was dropped gets no id of a step before, also if another sequence has it now.
    two.runner.step(make_step([(0, 0, 2, False)], adds=[row_add(0, [9, 8, 7, 6], [0])], drops=[0], step_id=11), take)
    two.runner.step(make_step([(0, 2, 2, True)], step_id=12), take)
    assert ids_of(first, 0) == [9, 8, 7, 6] == ids_of(last, 0)[:4]


def test_a_model_with_too_few_layers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, checkpoints.config_of(**UNEVEN))
    num_layers = ModelConfig.load(tmp_path).num_layers
    with pytest.raises(UserError, match=f"{num_layers + 1} stages, but the model has {num_layers} layers"):
        RankDriver(tmp_path, ISAS[0], num_stages=num_layers + 1, kv_mib=2)
