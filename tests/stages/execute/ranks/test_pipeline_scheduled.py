"""Stages of a pipeline with the real scheduler, several steps in flight: chunks, prefix hits, forks, swap, preemption,
grammars, logprobs, penalties and embeddings give the ids and the records of one process."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.ranks.test_ranks_scheduled import FEW, GRAMMAR, MANY, make_requests, results
from tests.stages.execute.structured import ids_of, write

ALL = bool(os.environ.get("PIPELINE_ALL_RANKS"))
"""More layouts, which take a minute."""

CASES = [((2, 1), 1, FEW, 20), ((1, 1, 1), 1, MANY, 0)]
if ALL:
    CASES += [((1, 2), 1, FEW, 0), ((1, 2), 2, FEW, 20), ((1, 1, 1), 1, FEW, 20), ((2, 1), 3, MANY, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("stages"), num_heads=6, num_kv_heads=3)


@pytest.mark.parametrize(("layers", "num_ranks", "num_blocks", "num_swap"), CASES)
def test_texts_and_records_are_those_of_one_process(
    folder: Path, layers: tuple[int, ...], num_ranks: int, num_blocks: int, num_swap: int
) -> None:
    prefix = ids_of("tell me all that you know about the following number: ")
    prompts = [prefix + ids_of(str(i)) if i % 2 else random_ids(7 * i + 1, i) for i in range(8)]
    requests = make_requests(prompts, 40)
    *expected, _ = results(folder, 1, requests, MANY, 0, 1)
    *found, of_stages = results(folder, num_ranks, requests, num_blocks, num_swap, len(layers), layers)
    assert found == expected
    assert of_stages.num_forks > 0 and of_stages.num_cached_tokens > 0
    assert (of_stages.num_preemptions > 0) == (num_blocks == FEW)
    assert (of_stages.num_blocks_swapped_in > 0) == (num_swap > 0)


if ALL:

    def test_smollm2_with_two_stages(smollm2_dir: Path) -> None:
        random = np.random.default_rng(0)
        shared = random.integers(100, 40000, 40).tolist()
        prompts = [shared + random.integers(100, 40000, 5 + 9 * i).tolist() for i in range(8)]
        requests = [
            msgspec.structs.replace(request, fields=() if request.fields == GRAMMAR else request.fields, at_step=i // 4)
            for i, request in enumerate(make_requests(prompts, 40))
        ]
        *expected, _ = results(smollm2_dir, 1, requests, MANY, 0, 1)
        *found, load = results(smollm2_dir, 1, requests, 20, 40, 2, (19, 11))
        assert found == expected
        assert load.num_blocks_swapped_in > 0 and load.num_forks > 0 and load.num_cached_tokens > 0
