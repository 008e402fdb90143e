"""Ranks with the real scheduler: chunks, prefix hits, forks, swap, grammars, logprobs, penalties and embeddings give
the ids and the records of one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.ranks.share import most_kv_heads
from tests.stages.execute.exactness.test_invariance import token_outputs_of
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import GREEDY, Pair, Request
from tests.stages.execute.rank_driver import RankRunners
from tests.stages.execute.structured import ids_of, lark, write

GRAMMAR = (("compiled_grammar", lark("[a-z]{24}(, [0-9]{3}){2}")),)
MANY, FEW = 160, 20


def make_requests(prompts: list[list[int]], num_tokens: int) -> list[Request]:
    """Each prompt with another feature; two have the same first blocks."""
    features: list[dict[str, Any]] = [
        {},
        {"seed": 3, "n": 3},
        {"seed": 4, "fields": token_outputs_of(num_logprobs=3, num_prompt_logprobs=2, repetition_penalty=1.3)},
        {"seed": 5, "n": 2, "fields": GRAMMAR},
        {"fields": (("pooling", 1),)},
        {"seed": 6, "fields": (("top_k", 20), ("top_p", 0.9), ("presence_penalty", 0.6))},
        {"fields": (("min_tokens", 9), ("bias_ids", [7, 80]), ("bias_values", [3.0, 5.0]))},
        {"seed": 7, "fields": GRAMMAR},
    ]
    return [
        Request(
            tuple(prompt), 1 if "pooling" in dict(given.get("fields", ())) else num_tokens, at_step=2 * i,
            **{"seed": GREEDY, **given},
        )
        for i, (prompt, given) in enumerate(zip(prompts, features, strict=True))
    ]  # fmt: skip


def settings_of(config: ModelConfig, num_ranks: int, num_blocks: int, layers: Sequence[int] = ()) -> Settings:
    """`layers` are those of the stages of a pipeline; by default there is one."""
    execute = ExecuteSettings(
        kv_cache_bytes=num_blocks * bytes_of_block(config, num_ranks, layers),
        num_threads=1,
        tensor_parallel=num_ranks,
        pipeline_parallel=len(layers) or 1,
        pipeline_layers=tuple(layers),
    )
    return Settings(execute=execute, schedule=ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=96))


def bytes_of_block(config: ModelConfig, num_ranks: int, layers: Sequence[int] = ()) -> int:
    """Of the rank with the largest blocks."""
    return block_bytes(max(layers, default=config.num_layers), most_kv_heads(config, num_ranks), config.head_dim, 2)


def results(
    folder: Path,
    num_ranks: int,
    requests: list[Request],
    num_blocks: int,
    num_swap: int,
    depth: int,
    layers: Sequence[int] = (),
) -> Any:
    """Texts and records of all requests, and the scheduler's counts."""
    config = ModelConfig.load(folder)
    settings = settings_of(config, num_ranks, num_blocks, layers)
    swap_bytes = num_swap * bytes_of_block(config, num_ranks, layers)
    runner: Any
    if num_ranks > 1 or layers:
        runner = RankRunners(settings, folder, swap_bytes)
    else:
        runner = CpuRunner(settings, folder, memoryview(bytearray(swap_bytes)) if swap_bytes else None)
    try:
        assert (runner.facts.num_blocks, runner.facts.num_swap_blocks) == (num_blocks, num_swap)
        limits: dict[str, Any] = {"preemption": "swap", "kv_offload": False} if num_swap else {}
        limits["num_stages"] = len(layers) or 1
        pair = Pair(runner, depth, max_num_batched_tokens=48, **limits)
        texts = pair.run(requests)
        assert not pair.errors
        return texts, pair.token_outputs, pair.prompt_logprobs, pair.scheduler.load()
    finally:
        runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks"), num_heads=6, num_kv_heads=3)


@pytest.mark.parametrize(
    ("num_ranks", "num_blocks", "num_swap", "depth"), [(2, MANY, 0, 1), (2, FEW, 20, 2), (3, FEW, 0, 1)]
)
def test_texts_and_records_are_those_of_one_process(
    folder: Path, num_ranks: int, num_blocks: int, num_swap: int, depth: int
) -> None:
    prefix = ids_of("tell me all that you know about the following number: ")
    prompts = [prefix + ids_of(str(i)) if i % 2 else random_ids(7 * i + 1, i) for i in range(8)]
    requests = make_requests(prompts, 40)
    *expected, _ = results(folder, 1, requests, MANY, 0, 1)
    *found, of_ranks = results(folder, num_ranks, requests, num_blocks, num_swap, depth)
    assert found == expected
    assert of_ranks.num_forks > 0 and of_ranks.num_cached_tokens > 0
    assert (of_ranks.num_preemptions > 0) == (num_blocks == FEW)
    assert (of_ranks.num_blocks_swapped_in > 0) == (num_swap > 0)


def test_a_grammar_that_fails_ends_only_its_row_on_all_ranks(folder: Path) -> None:
    """Rank 0 learns of it when the others wait for its ids."""
    bad = (("compiled_grammar", "no grammar"),)
    requests = [Request(tuple(random_ids(9, 1)), 12, seed=1), Request(tuple(random_ids(9, 2)), 12, fields=bad)]
    settings = settings_of(ModelConfig.load(folder), 2, MANY)
    runner = RankRunners(settings, folder)
    try:
        pair = Pair(runner)  # type: ignore[arg-type]
        texts = pair.run(requests)
        assert len(texts[0][0]) == 12 and texts[1] == [[]]
        assert list(pair.errors) == [(2, 0)]
    finally:
        runner.close()


def test_smollm2_with_two_ranks(smollm2_dir: Path) -> None:
    """Three KV heads: one rank has two of them."""
    random = np.random.default_rng(0)
    shared = random.integers(100, 40000, 40).tolist()
    prompts = [shared + random.integers(100, 40000, 5 + 9 * i).tolist() for i in range(8)]
    requests = [
        msgspec.structs.replace(request, fields=() if request.fields == GRAMMAR else request.fields, at_step=i // 4)
        for i, request in enumerate(make_requests(prompts, 40))
    ]
    *expected, _ = results(smollm2_dir, 1, requests, MANY, 0, 1)
    *found, load = results(smollm2_dir, 2, requests, 20, 40, 1)
    assert found == expected
    assert load.num_blocks_swapped_in > 0 and load.num_forks > 0 and load.num_cached_tokens > 0
