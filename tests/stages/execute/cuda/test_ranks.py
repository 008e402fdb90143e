"""Tensor parallelism on GPUs, interpreted: several ranks compute what one GPU, or torch on the CPU, computes."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.device import Calls, Device, Interpreted
from pipeline.stages.execute.cuda.ranks import device_ranks as ranks
from pipeline.stages.execute.cuda.ranks import link as rank_link
from pipeline.stages.execute.cuda.ranks.board import RankBoard
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.ranks.context import RankContext, RankLateError
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.cuda.rank_driver import CudaRankDriver, TurnBoard
from tests.stages.execute.driver import Driver, make_step, row_add, take

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

PROMPTS = [[5, 9, 200, 31, 7], [8, 100, 3]]
SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 80, "max_position": 96}


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RankBoard", TurnBoard)


def _folder(tmp_path: Path, **changes: Any) -> Path:
    checkpoints.write(tmp_path, checkpoints.config_of(**{**SMALL, **changes}))
    return tmp_path


BIASED = {"tie_embeddings": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven heads, tied, biases": (2, {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48, **BIASED}),
    "more ranks than KV heads, norms of heads": (
        3,
        {"architecture": "qwen3", "qk_norm": True, "num_heads": 5, "num_kv_heads": 1, "hidden_size": 40},
    ),
    "two layers": (2, {"num_heads": 4, "num_layers": 2}),
}
NUM = None if os.environ.get("PIPELINE_ALL_GPU_ARCHITECTURES") else 1
NAMES = tuple(VARIANTS)[:NUM]
TYPES = (("float32", "int8", 1e-4), ("bfloat16", "none", 0.05))[:NUM]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_return_what_the_cpu_returns(tmp_path: Path, name: str) -> None:
    num_ranks, changes = VARIANTS[name]
    folder, config = _folder(tmp_path, **changes), on_device(max_num_seqs=2, tokens=8)
    expected, ours = Driver(folder, on_cpu(config)), CudaRankDriver(folder, config, num_ranks)
    try:
        assert ours.generate(PROMPTS, 2) == expected.generate(PROMPTS, 2)
        np.testing.assert_allclose(ours.logits()[:2], expected.logits(), atol=1e-4)
    finally:
        ours.runner.close()


@pytest.mark.parametrize(("dtype", "quantization", "atol"), TYPES)
def test_ranks_return_what_one_gpu_returns(tmp_path: Path, dtype: Any, quantization: Any, atol: float) -> None:
    """Weights that are quantized while loading are cut between groups of the whole matrix, and have its codes."""
    changes: dict[str, Any] = {"num_heads": 4}
    if quantization != "none":
        changes |= {"head_dim": 64, "intermediate_size": 192}
    folder, config = _folder(tmp_path, **changes), on_device(max_num_seqs=2, tokens=8, dtype=dtype)
    config = msgspec.structs.replace(config, quantization=quantization)
    expected, ours = CudaDriver(folder, config), CudaRankDriver(folder, config, 2)
    try:
        ids = [ours.generate(PROMPTS, 1), expected.generate(PROMPTS, 1)]
        if dtype == "float32":
            assert ids[0] == ids[1]
        np.testing.assert_allclose(ours.logits()[:2], expected.logits()[:2], atol=atol)
    finally:
        ours.runner.close()


def test_long_steps_and_what_rank_0_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose sums are reduced, not gathered; logprobs of prompts and ids, penalties, filters, embeddings."""
    monkeypatch.setattr(rank_link, "GATHERED_TOKENS", 16)
    folder, config = _folder(tmp_path, num_heads=4), on_device(tokens=20)
    expected, ours = Driver(folder, on_cpu(config)), CudaRankDriver(folder, config, 2)
    options = [
        m.GenerationOptions(temperature=0.8, top_k=5, seed=3),
        m.GenerationOptions(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1, repetition_penalty=1.3),
        m.GenerationOptions(temperature=0.0, pooling=m.Pooling.MEAN),
        m.GenerationOptions(temperature=0.0, stop_token_ids=list(range(0, 300, 3))),
    ]
    ids = [[5 + row, 9, 200, 31, 7] for row in range(4)]
    adds = [row_add(row, ids[row], [row], one) for row, one in enumerate(options)]
    steps = [make_step([(row, 0, 5, True) for row in range(4)], adds=adds, step_id=1)]
    steps.append(make_step([(0, 5, 1, True), (1, 5, 1, True)], drops=[2, 3], step_id=2))
    try:
        for step in steps:
            found, meant = ours.runner.step(step, take), expected.runner.step(step, take)
            assert found.ids.tolist() == meant.ids.tolist() and found.finishes.tolist() == meant.finishes.tolist()
            for name in ("token_outputs", "prompt_logprobs"):
                one, other = (getattr(result, name).view(np.float32) for result in (found, meant))
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
        # Graphs are captured by steps only, never by a rank alone.
        assert ours.runner.ranks[1].capture_more() is False
    finally:
        ours.runner.close()


def test_all_ranks_capture_the_same_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run once when they are captured, with their collective operations, as on a GPU. A rank that did others
    would wait until a timeout."""
    folder, config = _folder(tmp_path, num_heads=4), on_device(max_num_seqs=4, tokens=8)
    expected, ours = CudaDriver(folder, config), CudaRankDriver(folder, config, 2)
    captured: list[Device] = []

    def graph(device: Interpreted, calls: Calls) -> Calls:
        captured.append(device)
        calls()
        return calls

    monkeypatch.setattr(Interpreted, "graph", graph)
    monkeypatch.setattr(Interpreted, "captures_graphs", True)
    try:
        ours.runner.on_all(CudaRunner.capture_graphs)
        nums = [captured.count(rank.device) for rank in ours.runner.ranks]
        assert nums[0] == nums[1] > 10
        options = m.GenerationOptions(temperature=0.9, top_k=50, seed=1, repetition_penalty=1.2, ignore_eos=True)
        assert ours.generate(PROMPTS, 2, options=options) == expected.generate(PROMPTS, 2, options=options)
        assert ours.generate(PROMPTS, 2) == expected.generate(PROMPTS, 2)
        assert [captured.count(rank.device) for rank in ours.runner.ranks] == nums, "the steps have captured nothing"
    finally:
        ours.runner.close()


def test_experts_are_cut_by_their_intermediate_size(tmp_path: Path) -> None:
    """Also the expert of all tokens, whose gate is part of the router."""
    variant = tiny_architectures.VARIANTS["qwen2_moe"]
    changes = {**variant.changes, "num_hidden_layers": 1}
    folder, _ = tiny_architectures.write(tmp_path, replace(variant, changes=changes))
    config = on_device(max_num_seqs=2, tokens=8)
    expected, ours = Driver(folder, on_cpu(config)), CudaRankDriver(folder, config, 2)
    try:
        assert ours.generate(PROMPTS, 1) == expected.generate(PROMPTS, 1)
        np.testing.assert_allclose(ours.logits()[:2], expected.logits(), atol=1e-4)
    finally:
        ours.runner.close()


def test_a_rank_has_only_its_part_of_the_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path, num_heads=4, intermediate_size=128)
    config = on_device(max_num_seqs=2, tokens=8)
    whole, ours = CudaRunner(config, folder), CudaRankDriver(folder, config, 2)
    try:
        for rank in ours.runner.ranks:
            for part, every in zip(rank.model.matrices, whole.model.matrices, strict=True):
                assert 2 * part.num_bytes == every.num_bytes
            assert rank.kv.shape[3] * 2 == whole.kv.shape[3]
        parts = [rank.model.head.values for rank in ours.runner.ranks]
        assert torch.equal(torch.cat(parts), whole.model.head.values) and len(parts[0]) < len(whole.model.head.values)
    finally:
        ours.runner.close()
        whole.close()


@pytest.mark.parametrize(
    ("changes", "quantization", "num_ranks", "message"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48},
            "none",
            4,
            r"4 ranks, but the model has 3 KV heads: choose 1, 2, 3 or 6",
        ),
        ({"num_heads": 4, "head_dim": 16}, "int8", 2, r"2 ranks would cut weights at column 32, within a group of 64"),
        ({"num_heads": 4, "num_kv_heads": 4, "intermediate_size": 48}, "none", 4, r"4 ranks, but the 48 columns"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, changes: dict[str, Any], quantization: Any, num_ranks: int, message: str
) -> None:
    folder = _folder(tmp_path, **changes)
    config = msgspec.structs.replace(on_device(max_num_seqs=2, tokens=8), quantization=quantization)
    with pytest.raises(UserError, match=r"execute\.tensor_parallel: " + message):
        CudaRankDriver(folder, config, num_ranks)


# ------------------------------------------------------------------------------------------------------------ the board


@pytest.fixture
def boards() -> Iterator[list[RankBoard]]:
    fd = os.memfd_create("ranks")
    yield [RankBoard(RankContext(rank, 2, fd, 0.2)) for rank in range(2)]
    os.close(fd)


def test_a_rank_that_does_not_come_to_a_step_is_named(boards: list[RankBoard]) -> None:
    boards[0].loaded()
    with pytest.raises(RankLateError, match=r"execute\.1 stood at the end of the step before, step 7, for 0\.2 s"):
        boards[0].begin(1, 7)
    with boards[1].busy():
        boards[0].check(60.0)
    boards[1].announce(1)
    boards[0].check(0.1)
    boards[0]._excused_s -= 60
    with pytest.raises(RankLateError, match=r"execute\.1 stood before a step that others have begun, step 7"):
        boards[0].check(60.0)


def test_a_step_of_a_dead_scheduler_is_abandoned(boards: list[RankBoard]) -> None:
    boards[1].announce(2)
    assert not boards[0].begin(1, 7)
    boards[0].announce(2)
    boards[1]._own[1 - 1] = 2 << 32 | 1
    assert boards[0].begin(2, 8)


# ----------------------------------------------------------------------------------------------------- in two processes


def _rank(rank: int, folder: Path, fd: int, out: Path) -> None:
    """A rank in a process of its own, over gloo, with sums in memory that both map."""
    ranks.RankBoard = RankBoard  # type: ignore[attr-defined]
    config = on_device(max_num_seqs=2, tokens=8)
    config = msgspec.structs.replace(
        config, execute=msgspec.structs.replace(config.execute, tensor_parallel=2, all_reduce="one_shot")
    )
    runner = CudaRunner(config, folder, join=ranks.join_by(RankContext(rank, 2, fd, 60.0)))
    adds = [row_add(row, prompt, [row]) for row, prompt in enumerate(PROMPTS)]
    first = make_step([(row, 0, len(prompt), True) for row, prompt in enumerate(PROMPTS)], adds=adds, step_id=1)
    second = make_step([(row, len(prompt), 1, True) for row, prompt in enumerate(PROMPTS)], step_id=2)
    ids = [runner.step(step, take).ids.tolist() for step in (first, second)]
    logits = runner.model.logits.tolist()
    runner.close()
    out.write_text(json.dumps({"ids": ids, "logits": logits}))


def test_two_processes_exchange_sums_in_symmetric_memory(tmp_path: Path) -> None:
    folder = _folder(tmp_path, num_heads=4)
    fd = os.memfd_create("ranks")
    fork = multiprocessing.get_context("fork")
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    processes = [fork.Process(target=_rank, args=(rank, folder, fd, outs[rank])) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        expected = Driver(folder, on_cpu(on_device(max_num_seqs=2, tokens=8)))
        texts = expected.generate(PROMPTS, 2)
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
        os.close(fd)
    found = [json.loads(out.read_text()) for out in outs]
    for one in found:
        assert [list(ids) for ids in zip(*one["ids"], strict=True)] == texts
    np.testing.assert_allclose(found[0]["logits"], expected.logits(), atol=1e-4)
    assert not found[1]["logits"]
