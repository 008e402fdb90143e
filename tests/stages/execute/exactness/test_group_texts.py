"""A tiny Gemma 3 has the same texts with KV groups as without, id by id, whatever the scheduler does: prefixes are
cached, prompts are chunked, sequences fork, are preempted and swapped. Uses the real scheduler and this machine's CPU
program. (test_invariance.py does the same for a model without windows.)"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import tiny_architectures
from tests.stages.execute.exactness.prompts import requests_with
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import Pair, Request, make_runner

WINDOW = 21
GROUPS = (KVGroup(0, 1), KVGroup(WINDOW, 1), KVGroup(WINDOW, 1))
MANY, FEW = 400, 23
"""Blocks of one layer: for all requests at once, and for a few of them."""
FEW_TOKENS = 24
"""Of a step, with few blocks: a long chunk needs many."""
PREFIX = random_ids(53, 99)


make_requests = partial(requests_with, PREFIX)


class Runners:
    """By memory and type of the KV cache. Each is loaded once; blocks contain what earlier tests wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder, _ = tiny_architectures.write(folder, tiny_architectures.VARIANTS["gemma3"])
        self._made: dict[Any, CpuRunner] = {}
        self._texts: dict[Any, Any] = {}

    def get(self, num_blocks: int, num_swap_blocks: int = 0, kv_dtype: str = "auto", *, has_groups: bool = True) -> Any:
        key = num_blocks, num_swap_blocks, kv_dtype, has_groups
        if key not in self._made:
            layer_bytes = block_bytes(1 if has_groups else 3, 2, 32, 1 if kv_dtype == "int8" else 2)
            how: dict[str, Any] = {
                "kv_dtype": kv_dtype,
                "hybrid_kv_cache_manager": has_groups,
                "num_swap_blocks": num_swap_blocks,
            }
            how["tokens"] = FEW_TOKENS if num_blocks == FEW else 0
            self._made[key] = runner = make_runner(self._folder, layer_bytes, num_blocks, **how)
            assert isinstance(runner.program, NativeProgram)
            assert tuple(runner.facts.kv_groups) == (GROUPS if has_groups else (KVGroup(0, 3),))
        return self._made[key]

    def expected(self, requests: list[Request], kv_dtype: str = "auto") -> list[list[list[int]]]:
        """The texts without groups, one sequence after the other, each prompt in one chunk, without a prefix cache."""
        key = kv_dtype, requests[0].n, requests[0].fields
        if key not in self._texts:
            pair = Pair(self.get(60, kv_dtype=kv_dtype, has_groups=False), prefix_caching=False, max_num_seqs=1)
            self._texts[key] = pair.run(requests)
        return self._texts[key]

    def close(self) -> None:
        for runner in self._made.values():
            runner.close()


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runners]:
    runners = Runners(tmp_path_factory.mktemp("gemma"))
    yield runners
    runners.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 33, 256])
def test_in_chunks_of_any_size_with_and_without_prefix_caching(
    runners: Runners, kv_dtype: str, prefix_caching: bool, max_num_batched_tokens: int
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
def test_preempted(runners: Runners, depth: int, num_swap_blocks: int, limits: dict[str, Any]) -> None:
    pair = Pair(runners.get(FEW, num_swap_blocks), depth, max_num_batched_tokens=FEW_TOKENS, **limits)
    assert pair.run(make_requests()) == runners.expected(make_requests())
    load = pair.scheduler.load()
    assert load.num_preemptions > 0
    if num_swap_blocks and limits.get("kv_offload", True):
        assert load.num_blocks_offloaded > 0, "blocks may be in the prefix cache when their sequence resumes"
    else:
        assert (load.num_blocks_swapped_in > 0) == (num_swap_blocks > 0)


@pytest.mark.parametrize("memory", [(MANY, 0), (FEW, 180)], ids=["enough", "swapped"])
def test_forked(runners: Runners, memory: tuple[int, int]) -> None:
    pair = Pair(runners.get(*memory), 2, max_num_batched_tokens=FEW_TOKENS, preemption="swap", kv_offload=False)
    assert pair.run(make_requests(3)) == runners.expected(make_requests(3))
    load = pair.scheduler.load()
    assert load.num_forks > 0
    assert (load.num_preemptions > 0) == (memory[0] == FEW)


@pytest.mark.parametrize("memory", [MANY, FEW])
def test_with_logprobs_of_prompts(runners: Runners, memory: int) -> None:
    requests = make_requests(more=(("num_logprobs", 2), ("num_prompt_logprobs", 1)))
    pair, lonely = (
        Pair(runners.get(memory), 2, max_num_batched_tokens=FEW_TOKENS),
        Pair(runners.get(60, has_groups=False), max_num_seqs=1),
    )
    assert pair.run(requests) == lonely.run(requests)
    assert pair.token_outputs == lonely.token_outputs
    assert pair.prompt_logprobs == lonely.prompt_logprobs


def test_embeddings(runners: Runners) -> None:
    requests = [Request(one.prompt, 1, fields=(("pooling", 1 + i % 2),)) for i, one in enumerate(make_requests())]
    pair, lonely = Pair(runners.get(MANY), 2, max_num_batched_tokens=33), Pair(runners.get(60, has_groups=False))
    pair.run(requests)
    lonely.run(requests)
    assert pair.token_outputs == lonely.token_outputs
