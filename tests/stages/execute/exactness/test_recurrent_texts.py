"""Tiny models with recurrent layers have the texts that their sequences have alone, id by id, whatever the scheduler
does: prompts are chunked, prefixes are found, sequences are preempted, swapped and restored. Uses the real scheduler
and this machine's CPU program."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute.exactness.prompts import requests_with
from tests.stages.execute.exactness.runners import FEW_TOKENS, Runners
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import NUM_THREADS, Pair, Request
from tests.stages.execute.rank_driver import RankRunners
from tests.stages.execute.recurrent_models import VARIANTS, write
from tests.stages.execute.structured import lark

SLOT, BLOCK = 31_488, 4096
"""Bytes of a state and of a KV block of the tiny models."""
MANY, FEW = 64 * SLOT + 400 * BLOCK, 9 * SLOT + 70 * BLOCK
SCARCE = {"max_num_batched_tokens": FEW_TOKENS, "num_blocks": 24}
PREFIX = random_ids(150, 99)
OTHERS = ["qwen3_5_moe", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3"]


make_requests = partial(requests_with, PREFIX)


class RecurrentRunners(Runners):
    """By model, memory and settings."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._root = folder
        self._folders: dict[str, Path] = {}

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            self._folders[model], _ = write(self._root / model, VARIANTS[model])
        return self._folders[model]

    def get(self, kv_bytes: int, swap_bytes: int = 0, model: str = "qwen3_5", **execute: Any) -> CpuRunner:
        def make() -> CpuRunner:
            tokens = FEW_TOKENS if kv_bytes == FEW else 256
            settings = Settings(
                execute=ExecuteSettings(
                    kv_cache_bytes=kv_bytes, **{"dtype": "bfloat16", "num_threads": NUM_THREADS, **execute}
                ),
                schedule=ScheduleSettings(
                    max_num_seqs=16, max_num_batched_tokens=tokens, max_num_prefill_tokens=tokens
                ),
            )
            return CpuRunner(settings, self.folder(model), memoryview(bytearray(swap_bytes)) if swap_bytes else None)

        return self.made((kv_bytes, swap_bytes, model, str(execute)), make)

    def expected(self, requests: list[Request], model: str = "qwen3_5", **execute: Any) -> list[list[list[int]]]:
        """The texts of each sequence alone, without snapshots."""
        return self.alone(self.get(MANY, model=model, **execute), requests)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecurrentRunners]:
    with RecurrentRunners(tmp_path_factory.mktemp("recurrent")).closing() as runners:
        yield runners


def test_memory_is_divided_between_blocks_and_slots(runners: RecurrentRunners) -> None:
    many, few = runners.get(MANY), runners.get(FEW, 40 * SLOT)
    assert isinstance(many.program, NativeProgram)
    assert (many.facts.num_state_slots, many.facts.num_blocks) == (MANY // 2 // SLOT, 446)
    assert few.facts.num_state_slots == FEW // 2 // SLOT
    assert few.facts.num_state_slots * SLOT + few.facts.num_blocks * BLOCK <= FEW
    assert (few.facts.num_swap_state_slots, few.facts.num_swap_blocks) == (20, 20 * SLOT // BLOCK)
    assert few.facts.state_tokens == SLOT * 16 // BLOCK


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 33, 256])
def test_in_chunks_of_any_size_with_and_without_prefix_caching(
    runners: RecurrentRunners, prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    limits = {"prefix_caching": prefix_caching, "max_num_batched_tokens": max_num_batched_tokens}
    expected, pair = runners.expected(make_requests()), Pair(runners.get(MANY), 2, **limits)
    for _ in range(2):
        assert pair.run(make_requests()) == expected
    assert pair.scheduler.load().num_preemptions == 0
    counts = pair.scheduler.kv_cache_manager.states.counts()
    assert (counts.num_hits > 4) == (counts.num_snapshots > 4) == prefix_caching


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("swap_bytes", "limits"),
    [
        (0, {"preemption": "recompute"}),
        (0, {"preemption": "recompute", "prefix_caching": False}),
        (40 * SLOT, {"preemption": "swap", "kv_offload": False}),
        (40 * SLOT, {"preemption": "swap", "kv_offload": False, "prefix_caching": False}),
        (200 * SLOT, {"preemption": "swap"}),
        (8 * SLOT, {"preemption": "recompute"}),
    ],
    ids=["recomputed", "recomputed, no caching", "swapped", "swapped, no caching", "offloaded", "little swap space"],
)
def test_preempted(runners: RecurrentRunners, depth: int, swap_bytes: int, limits: dict[str, Any]) -> None:
    pair = Pair(runners.get(FEW, swap_bytes), depth, **SCARCE, **limits)
    assert pair.run(make_requests()) == runners.expected(make_requests())
    load, counts = pair.scheduler.load(), pair.scheduler.kv_cache_manager.states.counts()
    assert load.num_preemptions > 0
    if swap_bytes and limits.get("kv_offload", True):
        assert counts.num_offloaded > 0
    elif depth == 1:  # else a row's state is ahead of its known ids
        assert (counts.num_swapped_out > 0) == (counts.num_restored > 0) == (swap_bytes > 0)


@pytest.mark.parametrize("memory", [(MANY, 0), (FEW, 40 * SLOT)], ids=["enough", "few"])
def test_parallel_samples(runners: RecurrentRunners, memory: tuple[int, int]) -> None:
    expected = runners.expected(make_requests(3))
    pair = Pair(runners.get(*memory), 2, max_num_batched_tokens=FEW_TOKENS)
    assert pair.run(make_requests(3)) == expected
    assert pair.scheduler.kv_cache_manager.states.counts().num_hits > 0


@pytest.mark.parametrize("memory", [MANY, FEW])
def test_with_logprobs_of_prompts(runners: RecurrentRunners, memory: int) -> None:
    requests = make_requests(more=(("num_logprobs", 2), ("num_prompt_logprobs", 1)))
    lonely = Pair(runners.get(MANY), max_num_seqs=1)
    expected = lonely.run(requests)
    pair = Pair(runners.get(memory), 2, max_num_batched_tokens=FEW_TOKENS)
    assert pair.run(requests) == expected
    assert pair.token_outputs == lonely.token_outputs
    assert pair.prompt_logprobs == lonely.prompt_logprobs


def test_embeddings(runners: RecurrentRunners) -> None:
    requests = [Request(one.prompt, 1, fields=(("pooling", 1 + i % 2),)) for i, one in enumerate(make_requests())]
    found = []
    for limits in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 33}):
        pair = Pair(runners.get(MANY), 2, **limits)
        pair.run(requests)
        found.append(pair.token_outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_beam_search(runners: RecurrentRunners, depth: int) -> None:
    fields = ("use_beam_search", True), ("num_logprobs", 0)
    requests = [Request(one.prompt, 30, n=3, fields=fields) for one in make_requests()[:9]]
    found = []
    for memory, limits in (MANY, {"prefix_caching": False}), (MANY, {}), (FEW, SCARCE):
        pair = Pair(runners.get(memory), depth, **limits)
        found.append(pair.run(requests))
    assert found[1:] == found[:1] * 2
    assert pair.scheduler.load().num_forks > 0
    assert len({tuple(beam) for beams in found[0] for beam in beams}) == 3 * len(requests)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_late_masks_absorb_no_token_twice(
    runners: RecurrentRunners, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (("compiled_grammar", lark("[a-z ]{30}")),)
    expected = runners.expected(make_requests(more=more), kernels=kernels)
    runner = runners.get(MANY, kernels=kernels)
    wait_for, waited = runner.program.wait_for, [0]

    def late_at_first(word: int, expected: int, timeout_ms: int) -> None:
        is_first = expected and expected != waited[-1]
        waited.append(expected)
        wait_for(word, expected + 1 if is_first else expected, 1 if is_first else timeout_ms)

    monkeypatch.setattr(runner.program, "wait_for", late_at_first)
    assert Pair(runner, 2).run(make_requests(more=more)) == expected
    assert len(waited) > 100


def test_with_keys_and_values_in_8_bits(runners: RecurrentRunners) -> None:
    how: dict[str, Any] = {"kv_dtype": "int8"}
    expected = runners.expected(make_requests(), **how)
    pair = Pair(runners.get(FEW, **how), 2, max_num_batched_tokens=FEW_TOKENS)
    for _ in range(2):
        assert pair.run(make_requests()) == expected


@pytest.mark.parametrize("model", OTHERS)
def test_other_models(runners: RecurrentRunners, model: str) -> None:
    expected = runners.expected(make_requests(2), model)
    pair = Pair(runners.get(FEW, 40 * SLOT, model), 2, **SCARCE)
    assert pair.run(make_requests(2)) == expected
    assert pair.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize(
    ("num_ranks", "layers"), [(1, (2, 2)), (1, (3, 1)), (1, (1, 1, 2)), (2, (4,)), (2, (1, 3))], ids=str
)
def test_ranks_and_stages_of_a_pipeline(runners: RecurrentRunners, num_ranks: int, layers: tuple[int, ...]) -> None:
    """With a stage that has all recurrent layers, and stages that have one kind of layers."""
    more = (("num_logprobs", 1),)
    expected = runners.expected(make_requests(more=more))
    settings = Settings(
        execute=ExecuteSettings(
            kv_cache_bytes=FEW,
            dtype="bfloat16",
            num_threads=1,
            tensor_parallel=num_ranks,
            pipeline_parallel=len(layers),
            pipeline_layers=layers if len(layers) > 1 else (),
        ),
        schedule=ScheduleSettings(
            max_num_seqs=16, max_num_batched_tokens=FEW_TOKENS, max_num_prefill_tokens=FEW_TOKENS
        ),
    )
    ranks: Any = RankRunners(settings, runners.folder("qwen3_5"), 80 * SLOT)
    try:
        pair = Pair(ranks, len(layers), num_stages=len(layers), **SCARCE)
        assert pair.run(make_requests(more=more)) == expected
        counts = pair.scheduler.kv_cache_manager.states.counts()
        assert counts.num_hits > 0 and counts.num_offloaded > 0
    finally:
        ranks.close()
