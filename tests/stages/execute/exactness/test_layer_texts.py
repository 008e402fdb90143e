"""A tiny Gemma 4, whose layers have heads of different sizes and share keys and values, has the same texts whatever the
scheduler does: prompts are chunked, prefixes are cached, sequences fork, are preempted and swapped. Uses the real
scheduler and this machine's CPU program."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.kv_groups import KVGroup
from tests.stages.execute.exactness.prompts import requests_with
from tests.stages.execute.exactness.runners import FEW_TOKENS, GroupRunners
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import Pair

WINDOW = 21
GROUPS = (KVGroup(0, 1), KVGroup(WINDOW, 1))
"""Three of six layers have keys and values of their own: two with a window and heads of 16, one with heads of 32."""
MANY, FEW = 300, 16
"""Blocks of one group: for all requests at once, and for a few of them."""
PREFIX = random_ids(53, 99)
UNIT_BYTES = {"auto": block_bytes(1, 1, 32, 2), "int8": 2 * block_bytes(1, 1, 16, 1)}
"""Of a block: of the layer with large heads, or of two with small ones. In 8 bits, each has scales of its own."""


make_requests = partial(requests_with, PREFIX)


def unit_bytes(kv_dtype: str, has_groups: bool) -> int:
    return UNIT_BYTES[kv_dtype] * (1 if has_groups else 2)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupRunners]:
    with GroupRunners(tmp_path_factory.mktemp("gemma4"), "gemma4", GROUPS, FEW, unit_bytes).closing() as runners:
        yield runners


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 33, 256])
def test_in_chunks_of_any_size(runners: GroupRunners, kv_dtype: str, max_num_batched_tokens: int) -> None:
    pair = Pair(runners.get(MANY, kv_dtype=kv_dtype), 2, max_num_batched_tokens=max_num_batched_tokens)
    for _ in range(2):
        assert pair.run(make_requests()) == runners.expected(make_requests(), kv_dtype)
    load = pair.scheduler.load()
    assert load.num_preemptions == 0
    assert load.num_cached_tokens > 500, "the second time, all prompts are cached"


@pytest.mark.parametrize(
    ("num_swap_blocks", "limits"),
    [
        (0, {"preemption": "recompute"}),
        (180, {"preemption": "swap", "kv_offload": False}),
        (600, {"preemption": "swap"}),
    ],
    ids=["recomputed", "swapped", "offloaded"],
)
def test_preempted(runners: GroupRunners, num_swap_blocks: int, limits: dict[str, Any]) -> None:
    pair = Pair(runners.get(FEW, num_swap_blocks), 2, max_num_batched_tokens=FEW_TOKENS, **limits)
    assert pair.run(make_requests()) == runners.expected(make_requests())
    load = pair.scheduler.load()
    if num_swap_blocks and limits.get("kv_offload", True):
        assert load.num_blocks_offloaded > 0
    else:
        assert load.num_preemptions > 0
        assert (load.num_blocks_swapped_in > 0) == (num_swap_blocks > 0)


def test_swapped_in_8_bits(runners: GroupRunners) -> None:
    """Keys are measured in the memory that there is, so the texts alone are those of the same runner."""
    few = runners.get(FEW, 180, "int8")
    alone = Pair(few, prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=FEW_TOKENS)
    pair = Pair(few, 2, preemption="swap", kv_offload=False, max_num_batched_tokens=FEW_TOKENS)
    assert pair.run(make_requests()) == alone.run(make_requests())
    assert pair.scheduler.load().num_blocks_swapped_in > 0


def test_forked(runners: GroupRunners) -> None:
    pair = Pair(runners.get(FEW, 180), 2, max_num_batched_tokens=FEW_TOKENS, preemption="swap", kv_offload=False)
    assert pair.run(make_requests(3)) == runners.expected(make_requests(3))
    assert pair.scheduler.load().num_forks > 0
