"""A tiny Gemma 3 has the same texts with KV groups as without, id by id, whatever the scheduler does: prefixes are
cached, prompts are chunked, sequences fork, are preempted and swapped. Uses the real scheduler and this machine's CPU
program. (test_invariance.py does the same for a model without windows.)"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.kv_groups import KVGroup
from tests.stages.execute.exactness.prompts import requests_with
from tests.stages.execute.exactness.runners import FEW_TOKENS, GroupRunners
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import Pair, Request

WINDOW = 21
GROUPS = (KVGroup(0, 1), KVGroup(WINDOW, 1), KVGroup(WINDOW, 1))
MANY, FEW = 400, 23
"""Blocks of one layer: for all requests at once, and for a few of them."""
PREFIX = random_ids(53, 99)


make_requests = partial(requests_with, PREFIX)


def unit_bytes(kv_dtype: str, has_groups: bool) -> int:
    return block_bytes(1 if has_groups else 3, 2, 32, 1 if kv_dtype == "int8" else 2)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupRunners]:
    with GroupRunners(tmp_path_factory.mktemp("gemma3"), "gemma3", GROUPS, FEW, unit_bytes).closing() as runners:
        yield runners


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 33, 256])
def test_in_chunks_of_any_size_with_and_without_prefix_caching(
    runners: GroupRunners, kv_dtype: str, prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    limits = {"prefix_caching": prefix_caching, "max_num_batched_tokens": max_num_batched_tokens}
    pair = Pair(runners.get(MANY, kv_dtype=kv_dtype), 2, **limits)
    for _ in range(2):
        assert pair.run(make_requests()) == runners.expected(make_requests(), kv_dtype)
    load = pair.scheduler.load()
    assert load.num_preemptions == 0
    assert (load.num_cached_tokens > 500) == prefix_caching, "the second time, all prompts are cached"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_swap_blocks", "limits"),
    [
        (0, {"preemption": "recompute"}),
        (0, {"preemption": "recompute", "prefix_caching": False}),
        (180, {"preemption": "swap", "kv_offload": False}),
        (180, {"preemption": "swap", "kv_offload": False, "prefix_caching": False}),
        (600, {"preemption": "swap"}),
        (60, {"preemption": "recompute"}),
    ],
    ids=["recomputed", "recomputed, no caching", "swapped", "swapped, no caching", "offloaded", "few swap blocks"],
)
def test_preempted(runners: GroupRunners, depth: int, num_swap_blocks: int, limits: dict[str, Any]) -> None:
    pair = Pair(runners.get(FEW, num_swap_blocks), depth, max_num_batched_tokens=FEW_TOKENS, **limits)
    assert pair.run(make_requests()) == runners.expected(make_requests())
    load = pair.scheduler.load()
    assert load.num_preemptions > 0
    if num_swap_blocks and limits.get("kv_offload", True):
        assert load.num_blocks_offloaded > 0, "blocks may be in the prefix cache when their sequence resumes"
    else:
        assert (load.num_blocks_swapped_in > 0) == (num_swap_blocks > 0)


@pytest.mark.parametrize("memory", [(MANY, 0), (FEW, 180)], ids=["enough", "swapped"])
def test_forked(runners: GroupRunners, memory: tuple[int, int]) -> None:
    pair = Pair(runners.get(*memory), 2, max_num_batched_tokens=FEW_TOKENS, preemption="swap", kv_offload=False)
    assert pair.run(make_requests(3)) == runners.expected(make_requests(3))
    load = pair.scheduler.load()
    assert load.num_forks > 0
    assert (load.num_preemptions > 0) == (memory[0] == FEW)


@pytest.mark.parametrize("memory", [MANY, FEW])
def test_with_logprobs_of_prompts(runners: GroupRunners, memory: int) -> None:
    requests = make_requests(more=(("num_logprobs", 2), ("num_prompt_logprobs", 1)))
    pair, lonely = (
        Pair(runners.get(memory), 2, max_num_batched_tokens=FEW_TOKENS),
        Pair(runners.get(60, has_groups=False), max_num_seqs=1),
    )
    assert pair.run(requests) == lonely.run(requests)
    assert pair.token_outputs == lonely.token_outputs
    assert pair.prompt_logprobs == lonely.prompt_logprobs


def test_embeddings(runners: GroupRunners) -> None:
    requests = [Request(one.prompt, 1, fields=(("pooling", 1 + i % 2),)) for i, one in enumerate(make_requests())]
    pair, lonely = Pair(runners.get(MANY), 2, max_num_batched_tokens=33), Pair(runners.get(60, has_groups=False))
    pair.run(requests)
    lonely.run(requests)
    assert pair.token_outputs == lonely.token_outputs
