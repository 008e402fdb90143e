"""Rows with grammars and the real scheduler: preempted, swapped and forked, with two steps in flight."""

import re
from pathlib import Path

import pytest

from tests.stages.execute.pair import Pair, Request, make_runner
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
