"""Rows of the CPU library: they are sampled greedily or drawn, stop alone, are reused, and wait for their masks."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cpu.program import MasksLate
from tests.stages.execute import checkpoints
from tests.stages.execute.checkpoints import EOS_ID
from tests.stages.execute.cpu.native_models import DRAWN
from tests.stages.execute.driver import GREEDY, GivenMasks, row_add
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

# --- rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


@pytest.fixture(params=[True, False], ids=["kept", "largest"])
def plain(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Native]:
    driver = Native(tiny, ISAS[0], request.param)
    yield driver
    driver.runner.close()


def test_greedy_and_sampled_rows_share_a_step_and_reuse_rows(plain: Native) -> None:
    """A row has its own temperature, whatever the previous user of the row had."""
    prompts = [random_ids(20, seed) for seed in range(3)]
    greedy = [plain.generate([prompt], 1)[0][0] for prompt in prompts]
    sampled = [plain.generate([prompt], 1, options=DRAWN)[0][0] for prompt in prompts]
    assert greedy != sampled
    plain.clear()
    assert [ids[0] for ids in plain.generate(prompts, 1, options=DRAWN)] == sampled
    plain.clear()
    assert [ids[0] for ids in plain.generate(prompts, 1)] == greedy
    plain.clear()
    adds = [row_add(i, prompts[i], plain.take_blocks(32), [DRAWN, GREEDY, DRAWN][i]) for i in range(3)]
    mixed = plain.step([(i, 0, 20, True) for i in range(3)], adds=adds)
    assert mixed.ids.tolist() == [sampled[0], greedy[1], sampled[2]]


def test_each_seed_and_index_has_its_own_samples(plain: Native) -> None:
    ids = set()
    for index, seed in [(0, 1), (1, 1), (0, 2)]:
        plain.clear()
        options = m.GenerationOptions(temperature=3.0, seed=seed, ignore_eos=True)
        add = row_add(0, random_ids(10, 0), plain.take_blocks(32), options, index=index)
        plain.step([(0, 0, 10, True)], adds=[add])
        for position in range(10, 16):
            plain.step([(0, position, 1, True)])
        ids.add(tuple(plain.runner.rows.ids[0, 10:17].tolist()))
    assert len(ids) == 3


@pytest.mark.parametrize("by", ["eos", "stop_token_ids"])
def test_a_stop_id_ends_only_its_row(plain: Native, by: str) -> None:
    prompts = [random_ids(20, seed) for seed in range(2)]
    first, other = plain.generate([prompts[0]], 1)[0][0], plain.generate([prompts[1]], 3)[0]
    plain.clear()
    stops = m.GenerationOptions(temperature=0.0, ignore_eos=by != "eos", stop_token_ids=[first] if by != "eos" else [])
    plain.runner._changes._eos_ids = [first] if by == "eos" else [EOS_ID]
    adds = [row_add(0, prompts[0], plain.take_blocks(32), stops), row_add(1, prompts[1], plain.take_blocks(32))]
    result = plain.step([(0, 0, 20, True), (1, 0, 20, True)], adds=adds)
    assert result.ids.tolist() == [first, other[0]]
    assert result.finishes.tolist() == [Finish.STOP, Finish.NONE]
    assert plain.step([(0, 20, 1, True), (1, 20, 1, True)]).ids.tolist() == [-1, other[1]]
    assert plain.step([(1, 21, 1, True)]).ids.tolist() == [other[2]]


# --- masks


def test_a_step_samples_only_after_its_masks_arrive_and_releases_the_gil(tiny: Path) -> None:
    driver = Native(tiny, ISAS[0])
    masks: Any = GivenMasks(driver.runner)
    driver.runner.masks = driver.runner._changes._masks = masks
    mask = masks.words[0]
    mask[:] = 2**32 - 1
    ids: list[int] = []
    masked = m.GenerationOptions(temperature=0.0, ignore_eos=True, compiled_grammar="any")
    add = row_add(0, random_ids(20, 0), driver.take_blocks(32), masked)
    step = threading.Thread(target=lambda: ids.extend(driver.step([(0, 0, 20, True)], adds=[add]).ids.tolist()))
    step.start()
    # This thread could not do this if the step held the interpreter lock.
    ended = time.monotonic() + 0.2
    while time.monotonic() < ended:
        assert step.is_alive() and not ids
    mask[:] = 0
    mask[250 // 32] = 1 << 250 % 32
    masks.word[0] = masks.ticket
    step.join(10)
    assert ids == [250]
    driver.runner.close()


def test_late_masks_are_reported_and_the_program_runs_again(tiny: Path) -> None:
    driver = Native(tiny, ISAS[0], keep_logits=False)
    prompt = random_ids(20, 0)
    expected = driver.generate([prompt], 4)
    driver.clear()
    word = np.zeros(1, np.uint32)
    driver.program.wait_for(word.ctypes.data, 1, 20)
    for seed in (1, 2):
        driver.clear()
        with pytest.raises(MasksLate, match="20 ms"):
            driver.generate([random_ids(30, seed)], 1)
    driver.program.wait_for(0, 0, 0)
    driver.clear()
    assert driver.generate([prompt], 4) == expected
    driver.runner.close()
