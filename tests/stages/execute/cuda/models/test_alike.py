"""A GPU runner computes what the CPU runner does: the same random plans, steps, rows and sampling options."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.execute.publishing import Sampled
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver, make_step, row_add, take

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

NUM_ROWS, BUDGET, MAX_LEN, BLOCKS_PER_ROW = 4, 16, 96, 6


class Pair:
    """A GPU runner and a CPU runner."""

    def __init__(self, folder: Path) -> None:
        config = on_device(max_num_seqs=NUM_ROWS, tokens=BUDGET)
        self.ours, self.expected = CudaDriver(folder, config), Driver(folder, on_cpu(config))

    def clear(self) -> None:
        self.ours.clear()
        self.expected.clear()

    def step(self, *args: Any, **kwargs: Any) -> Sampled:
        """Compute a step on both, and compare. Returns the result."""
        step = make_step(*args, **kwargs)
        ours, expected = self.ours.runner.step(step, take), self.expected.runner.step(step, take)
        assert ours.rows.tolist() == expected.rows.tolist()
        assert ours.generations.tolist() == expected.generations.tolist()
        assert ours.ids.tolist() == expected.ids.tolist()
        assert ours.finishes.tolist() == expected.finishes.tolist()
        assert ours.errors == expected.errors
        _close(ours.token_outputs, expected.token_outputs)
        _close(ours.prompt_logprobs, expected.prompt_logprobs)
        return ours


def _close(ours: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> None:
    assert len(ours) == len(expected)
    a, b = ours.view(np.float32), expected.view(np.float32)
    # Ids are small integers, so as floats they are almost zero; they are equal on both sides or different.
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    ids = (np.abs(b) < 1e-30) & (b != 0)
    assert (ours.view(np.int32)[ids] == expected.view(np.int32)[ids]).all()


@pytest.fixture(scope="module")
def pair(slight_dir: Path) -> Pair:
    return Pair(slight_dir)


FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.6, "min_p": 0.02},
    {"num_logprobs": 4},
    {"temperature": 1.0, "num_logprobs": 0, "bias_ids": [3, 250], "bias_values": [4.0, 30.0], "min_tokens": 2},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7, "num_prompt_logprobs": 2},
    {
        "allowed_ids": np.arange(10, 60, 7, dtype=np.int32).tobytes(),
        "bad_words_ids": [[17], [24, 31], [m.BEGIN, 10], [m.BEGIN, 45]],
        "temperature": 2.0,
    },
    {"pooling": m.Pooling.MEAN},
    {"pooling": m.Pooling.LAST},
    {"allowed_ids": np.array([9], np.int32).tobytes(), "bad_words_ids": [[9]]},
]


@pytest.mark.parametrize("seed", range(2))
def test_random_plans(pair: Pair, seed: int) -> None:
    """Rows start with prompts of any length, in chunks of any size, decode, stop, fail and are replaced by others."""
    pair.clear()
    chance = random.Random(seed)
    waiting = [{"temperature": 0.0, "seed": chance.getrandbits(64), **fields} for fields in FEATURES]
    chance.shuffle(waiting)
    live: dict[int, dict[str, int]] = {}
    generation = 0
    for _ in range(5):
        drops = [row for row in live if live[row]["over"]]
        live = {row: one for row, one in live.items() if row not in drops}
        adds, entries, left = [], [], BUDGET
        while waiting and len(live) < NUM_ROWS:
            row = next(row for row in range(NUM_ROWS) if row not in live)
            generation += 1
            ids = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 9))]
            options = m.GenerationOptions(stop_token_ids=chance.sample(range(VOCAB_SIZE), 60), **waiting.pop())
            blocks = list(range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW))
            adds.append(row_add(row, ids, blocks, options, generation=generation))
            live[row] = {"known": len(ids), "computed": 0, "over": 0, "pools": int(options.pooling > 0)}
        for row, one in live.items():
            count = min(one["known"] - one["computed"], left, chance.randint(1, 9))
            if count:
                whole = one["computed"] + count == one["known"]
                entries.append((row, one["computed"], count, whole))
                one["computed"] += count
                left -= count
        made = pair.step(entries, adds=adds, drops=drops)
        for row, token, finish in zip(made.rows.tolist(), made.ids.tolist(), made.finishes.tolist(), strict=True):
            live[row]["known"] += 1
            # A row that has stopped is planned once more, as by a scheduler that does not have the result yet.
            live[row]["over"] += live[row]["pools"] or (finish != m.Finish.NONE and chance.random() < 0.5)
            live[row]["over"] += token < 0


def test_steps_are_launched_before_the_previous_result_is_known(pair: Pair) -> None:
    """Four steps in flight, collected late, have the ids of sequential steps. The last has more samples than a decode
    step has for a row, and logprobs that end with it."""
    pair.clear()
    prompt = [5, 9, 200, 31, 7]
    options = [m.GenerationOptions(temperature=1.0, seed=9), m.GenerationOptions(temperature=0.0, num_logprobs=1)]
    adds = [row_add(row, prompt[: 5 - row], [row], one) for row, one in enumerate(options)]
    steps = [make_step([(0, 0, 5, True), (1, 0, 4, True)], adds=adds, step_id=1)]
    steps += [make_step([(0, 4 + i, 1, True), (1, 3 + i, 1, True)], step_id=1 + i) for i in range(1, 4)]
    runner = pair.ours.runner
    published: list[int] = []
    runner.publish = lambda launched_step, sampled: published.append(launched_step.step_id)
    launched_steps = [runner.launch(step, take) for step in steps]
    assert list(runner.launched_steps) == launched_steps and not published
    ours = runner.drain()
    assert published == [1, 2, 3, 4]
    runner.publish = lambda launched_step, sampled: None
    for one, step in zip(ours, steps, strict=True):
        expected = pair.expected.runner.step(step, take)
        assert one.ids.tolist() == expected.ids.tolist()
        assert len(one.token_outputs) == logprob_bytes(1)
        _close(one.token_outputs, expected.token_outputs)


def test_an_invalid_plan_raises_an_error(pair: Pair) -> None:
    pair.clear()
    runner = pair.ours.runner
    wrong = [
        (make_step([(0, 0, 1, True)]), "not taken"),
        (make_step([(0, 0, 1, True)], adds=[row_add(0, [5], [])]), "without a block"),
        (make_step(adds=[row_add(0, [5], [1])]), "taken already"),
        (make_step(drops=[3]), "not taken"),
        (make_step([(0, -1, 1, True)]), "compute"),
        (make_step(copies=[(1, 10**6)]), "copied"),
    ]
    for step, why in wrong:
        with pytest.raises(AssertionError, match=why):
            runner.launch(step, take)
