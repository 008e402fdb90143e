"""Rows with grammars and the real scheduler: preempted, swapped and forked, with two steps in flight."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.kernels.step_inputs import IntArray
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner
from tests.stages.execute.structured import EOS, ids_of, lark, text_of, write

BLOCK_BYTES = 2 * 3 * 16 * 2 * 16 * 2
"""Tiny model: keys and values x layers x tokens x heads x dimensions x bytes of a number."""

PATTERN = "[a-z]{24}(, [0-9]{3}){2}"
GRAMMAR = lark(PATTERN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("scheduled"))


def make_requests() -> list[Request]:
    prompts = [tuple(ids_of(f"{i}: say what you know of number {i}: ")) for i in range(6)]
    return [
        Request(
            prompt, 60, seed=i, n=1 + i % 3, at_step=2 * i, fields=(("compiled_grammar", GRAMMAR),) if i % 4 else ()
        )
        for i, prompt in enumerate(prompts)
    ]


def test_outputs_do_not_depend_on_scheduling(folder: Path) -> None:
    found = []
    for depth, num_blocks, num_swap_blocks in ((1, 200, 0), (1, 16, 0), (2, 16, 0), (2, 18, 12)):
        runner = make_runner(folder, BLOCK_BYTES, num_blocks, num_swap_blocks=num_swap_blocks, dtype="bfloat16")
        try:
            pair = Pair(runner, depth)
            found.append(pair.run(make_requests()))
            load = pair.scheduler.load()
            assert (load.num_preemptions > 0) == (num_blocks < 100), load
            assert load.num_forks > 0
        finally:
            runner.close()
    assert found[1:] == found[:1] * (len(found) - 1)
    for request, texts in zip(make_requests(), found[0], strict=True):
        assert len(set(map(tuple, texts))) == len(texts)
        for ids in texts:
            assert not request.fields or (ids[-1] == EOS and re.fullmatch(PATTERN, text_of(ids[:-1])))


FORCED = (
    r"""start: "{\"name\": \"" /[a-z]{4,8}/ "\", \"numbers\": [" /[0-9]{2}/ ", " /[0-9]{3}/ "], \"done\": true}" """
)


class Wrong:
    """Proposes what the grammar may not allow, or the end."""

    reads_hidden_states = False
    draft_s = pass_s = 0.0

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        ids = np.array([*ids_of("ab1"), EOS, *ids_of("2, ")], np.int32)
        return [np.roll(ids, -(int(row) % len(ids)))[:num] for row, num in zip(rows, most.tolist(), strict=True)]

    def observe(self, *of_a_step: Any) -> None:
        pass

    def drop(self, rows: IntArray) -> None:
        pass

    def close(self) -> None:
        pass


def test_speculation_changes_no_structured_output(folder: Path) -> None:
    """Forced ids are proposed, and accepted; other proposals are verified with a mask for each."""
    requests = [
        Request(
            tuple(ids_of(f"say {i}: ")), 90, seed=i if i % 2 else GREEDY, n=1 + i % 2, at_step=2 * i,
            fields=(("compiled_grammar", (FORCED, GRAMMAR, "")[i % 3]), ("num_logprobs", i % 2)),
        )
        for i in range(7)
    ]  # fmt: skip
    found = []
    for num_speculative_tokens, num_blocks, depth in ((0, 200, 1), (6, 200, 1), (6, 16, 2)):
        runner = make_runner(folder, BLOCK_BYTES, num_blocks, num_speculative_tokens=num_speculative_tokens)
        try:
            pair = Pair(runner, depth, adaptive_speculation=False)
            if runner.speculator is not None:
                runner.speculator.proposer = Wrong()
            found.append((pair.run(requests), pair.token_outputs))
            counts = pair.scheduler.speculation.counts()
            if num_speculative_tokens:
                assert 100 < counts.num_accepted_tokens < counts.num_draft_tokens
            assert (pair.scheduler.load().num_preemptions > 0) == (num_blocks < 100)
        finally:
            runner.close()
    assert found[1:] == found[:1] * 2
    pattern = r'\{"name": "[a-z]{4,8}", "numbers": \[[0-9]{2}, [0-9]{3}\], "done": true\}'
    for texts in found[0][0][::3]:
        assert all(re.fullmatch(pattern, text_of([token for token in ids if token != EOS])) for ids in texts)
