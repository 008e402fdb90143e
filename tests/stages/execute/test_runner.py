"""A runner follows the meaning of a step: rows, stops, several steps in flight, keyed noise, limits."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import EOS_ID, VOCAB_SIZE
from tests.stages.execute.driver import GREEDY, Driver, make_step, row_add, settings, take

PROMPT = [5, 9, 200, 31, 7, 7, 120, 88, 64, 3]

SAMPLED = m.GenerationOptions(temperature=1.5, seed=2**64 - 3, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tiny_dir: Path) -> Driver:
    return Driver(tiny_dir, settings())


@pytest.fixture
def driver(shared: Driver) -> Driver:
    shared.clear()
    return shared


def start(driver: Driver, options: m.GenerationOptions, *, row: int = 0, generation: int = 1, index: int = 0) -> int:
    """Add a row with PROMPT and compute it. Returns the sampled id."""
    add = row_add(row, PROMPT, driver.take_blocks(64), options, generation=generation, index=index)
    result = driver.step([(row, 0, len(PROMPT), True)], adds=[add])
    return int(result.ids[0])


def test_results_contain_row_generation_and_id_of_each_sample(driver: Driver) -> None:
    adds = [row_add(row, PROMPT, driver.take_blocks(32), generation=70 + row) for row in (4, 1, 6)]
    result = driver.step([(4, 0, 10, True), (1, 0, 4, False), (6, 0, 10, True)], adds=adds)
    assert result.rows.tolist() == [4, 6]
    assert result.generations.tolist() == [74, 76]
    assert result.ids[0] == result.ids[1] and 0 <= result.ids[0] < VOCAB_SIZE
    assert result.finishes.tolist() == [Finish.NONE, Finish.NONE]
    assert [array.dtype for array in (result.rows, result.generations, result.ids, result.finishes)] == [
        np.int32,
        np.uint32,
        np.int32,
        np.uint8,
    ]


def test_a_step_that_only_changes_rows_has_an_empty_result(driver: Driver) -> None:
    result = driver.step(adds=[row_add(0, PROMPT, driver.take_blocks(16))])
    assert len(result.rows) == len(result.ids) == 0
    assert driver.runner.rows.num_live == 1
    driver.step(drops=[0])
    assert driver.runner.rows.num_live == 0


def test_the_next_step_reads_the_sampled_id_in_place(driver: Driver) -> None:
    first = start(driver, SAMPLED)
    second = driver.step([(0, 10, 1, True)]).ids[0]
    assert first != second
    row = row_add(1, [*PROMPT, first], driver.take_blocks(32), SAMPLED)
    assert driver.step([(1, 0, 11, True)], adds=[row]).ids[0] == second


@pytest.mark.parametrize("by", ["eos", "stop_token_ids"])
def test_a_stop_id_ends_its_row_for_steps_already_planned(tiny_dir: Path, driver: Driver, by: str) -> None:
    first = start(driver, GREEDY)
    driver.clear()
    if by == "eos":
        driver.runner._changes._eos_ids = [first]
        options = m.GenerationOptions(temperature=0.0)
    else:
        options = m.GenerationOptions(temperature=0.0, ignore_eos=True, stop_token_ids=[first, 299])
    try:
        other = row_add(1, PROMPT[:5], driver.take_blocks(32), generation=9)
        mine = row_add(0, PROMPT, driver.take_blocks(64), options, generation=8)
        result = driver.step([(0, 0, 10, True), (1, 0, 5, True)], adds=[mine, other])
        assert result.ids[0] == first
        assert result.finishes.tolist() == [Finish.STOP, Finish.NONE]
        assert driver.runner.rows.num_live == 1
        # The next step was planned before the stop was known.
        block = int(driver.runner.rows.blocks[0, 0])
        layer = driver.layers[0].keys[block].clone()
        result = driver.step([(0, 10, 1, True), (1, 5, 1, True)])
        assert result.rows.tolist() == [0, 1] and result.generations.tolist() == [8, 9]
        assert result.ids[0] == -1 and result.ids[1] >= 0
        assert result.finishes.tolist() == [Finish.NONE, Finish.NONE]
        assert (driver.layers[0].keys[block] == layer).all()
        # All rows of a step may have ended.
        driver.step(drops=[1])
        assert driver.step([(0, 11, 1, True)]).ids.tolist() == [-1]
        driver.step(drops=[0])
    finally:
        driver.runner._changes._eos_ids = [EOS_ID]


def test_ignore_eos_continues(driver: Driver) -> None:
    first = start(driver, GREEDY)
    driver.clear()
    driver.runner._changes._eos_ids = [first]
    try:
        start(driver, m.GenerationOptions(temperature=0.0, ignore_eos=True))
        assert driver.runner.rows.num_live == 1
    finally:
        driver.runner._changes._eos_ids = [EOS_ID]


def test_a_row_is_dropped_and_reused_in_one_step(driver: Driver) -> None:
    first = start(driver, m.GenerationOptions(temperature=0.0, ignore_eos=True), generation=1)
    add = row_add(0, PROMPT, driver.take_blocks(32), generation=2)
    result = driver.step([(0, 0, 10, True)], drops=[0], adds=[add])
    assert result.generations.tolist() == [2] and result.ids.tolist() == [first]


def test_blocks_are_appended_before_they_are_needed(driver: Driver) -> None:
    blocks = driver.take_blocks(64)
    driver.step([(0, 0, 10, True)], adds=[row_add(0, PROMPT, blocks[:1], SAMPLED)])
    for position in range(10, 40):
        more = [(0, blocks[position // 16])] if position % 16 == 0 else []
        driver.step([(0, position, 1, True)], blocks=more)
    made = driver.runner.rows.ids[0, 10:41].tolist()
    driver.clear()
    assert driver.generate([PROMPT], 31, options=SAMPLED)[0] == made


def test_sampled_text_is_the_same_alone_batched_and_chunked(driver: Driver) -> None:
    alone = driver.generate([PROMPT], 20, options=SAMPLED)[0]
    driver.clear()
    batched = driver.generate([PROMPT, PROMPT[:4], PROMPT], 20, options=SAMPLED, chunk=3)
    assert batched[0] == batched[2] == alone
    assert batched[1] != alone


def test_sampled_text_continues_unchanged_after_a_preemption(driver: Driver) -> None:
    whole = driver.generate([PROMPT], 20, options=SAMPLED)[0]
    driver.clear()
    assert driver.generate([PROMPT + whole[:8]], 12, options=SAMPLED)[0] == whole[8:]


def test_each_index_and_seed_has_its_own_samples(driver: Driver) -> None:
    options = [m.GenerationOptions(temperature=3.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    ids = []
    for row, (index, one) in enumerate(zip((0, 1, 0), options, strict=True)):
        start(driver, one, row=row, index=index)
        for position in range(10, 16):
            driver.step([(row, position, 1, True)])
        ids.append(tuple(driver.runner.rows.ids[row, 10:17].tolist()))
    assert len(set(ids)) == 3


def test_greedy_and_sampled_rows_share_a_batch(driver: Driver) -> None:
    greedy = start(driver, GREEDY)
    sampled_texts = start(driver, SAMPLED, row=1)
    driver.clear()
    adds = [row_add(row, PROMPT, driver.take_blocks(32), s) for row, s in enumerate([SAMPLED, GREEDY, SAMPLED])]
    result = driver.step([(row, 0, 10, True) for row in range(3)], adds=adds)
    assert result.ids.tolist() == [sampled_texts, greedy, sampled_texts]


def test_a_greedy_batch_never_runs_the_sampler(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("sampled")

    monkeypatch.setattr("pipeline.kernels.sampling.sample.sample", fail)
    driver = Driver(tiny_dir, settings())
    assert len(driver.generate([PROMPT, PROMPT[:3]], 4)[0]) == 4
    with pytest.raises(AssertionError, match="sampled"):
        driver.generate([PROMPT], 1, options=SAMPLED)


@pytest.mark.parametrize(
    ("kv_mib", "max_model_len", "expected"), [(16, 0, 256), (16, 100, 100), (16, 1000, 256), (1, 0, 256)]
)
def test_the_longest_sequence_is_the_smallest_of_the_limits(
    tiny_dir: Path, kv_mib: int, max_model_len: int, expected: int
) -> None:
    facts = CpuRunner(settings(kv_mib=kv_mib, max_model_len=max_model_len), tiny_dir).facts
    # 3 layers x 2 x 16 tokens x 2 heads x 16 dimensions x 4 bytes
    assert facts.num_blocks == kv_mib * 1024**2 // 12288
    assert (facts.block_size, facts.max_model_len, facts.vocab_size) == (16, expected, VOCAB_SIZE)


def test_kv_memory_limits_the_longest_sequence_and_the_error_names_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"num_kv_heads": 16, "num_heads": 16, "head_dim": 256, "num_layers": 1, "hidden_size": 16}
    checkpoints.write(tmp_path, checkpoints.config_of(**shape))
    assert CpuRunner(settings(kv_mib=1), tmp_path).facts.max_model_len == 2 * 16
    assert "raise execute.kv_cache_bytes to 8MiB" in caplog.text, "16 blocks hold the model's 256 positions"
    checkpoints.write(tmp_path, checkpoints.config_of(**{**shape, "num_layers": 3}))
    with pytest.raises(ValueError, match=r"raise execute\.kv_cache_bytes"):
        CpuRunner(settings(kv_mib=1), tmp_path)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, checkpoints.config_of())
    checkpoints.config_of(num_layers=4).save(tmp_path)
    with pytest.raises(ValueError, match=r"lack the tensor 'model\.layers\.3\."):
        CpuRunner(settings(), tmp_path)
    checkpoints.config_of(intermediate_size=81).save(tmp_path)
    with pytest.raises(ValueError, match=r"gate_proj.* has shape \[80, 48\]"):
        CpuRunner(settings(), tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(0, 11, 1, False)], "before they are known|computed are"),
        ([(0, 9, 1, False)], "computed are"),
        ([(3, 0, 1, False)], "not taken"),
        ([(0, 10, 1, False), (0, 10, 1, False)], "twice"),
        ([(0, 10, 0, False)], "computes nothing"),
        ([(0, 10, 2, True)], "before they are known"),
    ],
)
def test_an_invalid_plan_raises_an_error(
    driver: Driver, entries: list[tuple[int, int, int, bool]], message: str
) -> None:
    start(driver, GREEDY)
    with pytest.raises(AssertionError, match=message):
        driver.step(entries)


def test_a_used_row_a_free_row_and_unknown_blocks_are_rejected(driver: Driver) -> None:
    start(driver, GREEDY)
    for step in (
        make_step(adds=[row_add(0, PROMPT, [])]),
        make_step(drops=[5]),
        make_step(blocks=[(0, driver.runner.facts.num_blocks)]),
        make_step(blocks=[(6, 0)]),
        make_step(adds=[row_add(7, [VOCAB_SIZE], [])]),
    ):
        with pytest.raises(AssertionError):
            driver.runner.step(step, take)


def test_tokens_without_a_block_are_rejected(driver: Driver) -> None:
    with pytest.raises(AssertionError, match="without a block"):
        driver.step([(0, 0, 17, False)], adds=[row_add(0, PROMPT * 2, driver.take_blocks(16))])
