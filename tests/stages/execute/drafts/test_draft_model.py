"""A draft model changes no text. If it is the model itself, all that it proposes is right."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.errors import UserError
from pipeline.kernels.cpu.build import default_cache_root
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.messages import GenerationOptions
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.drafts.draft_model import DraftModel, draft_block_bytes
from pipeline.stages.execute.kv import kv_block_bytes, layout_of
from tests.stages.execute import checkpoints, recurrent_models
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, NUM_THREADS, Pair, Request, make_runner

BLOCK_BYTES = block_bytes(3, 2, 16, 2)
FEW = 16
"""KV blocks, so that rows are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder, checkpoints.config_of())
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[CpuRunner]:
    runner = make_runner(folder, BLOCK_BYTES, 160)
    yield runner
    runner.close()


def speculating(folder: Path, draft: Path, root: Path, num_blocks: int = FEW, **how: Any) -> CpuRunner:
    """With memory for exactly this many blocks of both caches."""
    config, of_draft = ModelConfig.load(folder), ModelConfig.load(draft)
    execute = ExecuteSettings(num_threads=NUM_THREADS, **how)
    layout = layout_of(Settings(execute=execute), config)
    num_bytes = kv_block_bytes(execute, config, layout) + kv_block_bytes(execute, of_draft)
    settings = Settings(
        model=str(folder),
        cache_dir=str(root),
        execute=msgspec.structs.replace(execute, kv_cache_bytes=num_blocks * num_bytes),
        schedule=ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=256),
        speculative=SpeculativeSettings(method="draft_model", draft=str(draft), num_speculative_tokens=4),
    )
    kernels = default_cache_root() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (root / "kernels").symlink_to(kernels)  # to compile nothing again
    link = draft_link(settings)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(draft)
    runner = CpuRunner(settings, folder, memoryview(bytearray(8 * BLOCK_BYTES)))
    assert runner.facts.num_blocks == num_blocks
    assert runner.speculator is not None and isinstance(runner.speculator.proposer, DraftModel)
    return runner


def requests() -> list[Request]:
    """Some share a prefix, one has a prompt that takes several steps to catch up."""
    made = []
    for i in range(12):
        prompt = (random_ids(40, 99) if i % 3 == 0 else []) + random_ids(5 + 4 * i, i)
        fields = (("repetition_penalty", 1.2),) if i % 4 == 1 else (("num_logprobs", 1),) if i % 4 == 2 else ()
        made.append(Request(tuple(prompt), 20 + i, GREEDY if i % 2 else i, 1 + i % 2, at_step=3 * i, fields=fields))
    return [*made, Request(tuple(random_ids(180, 50)), 20, 3)]


def test_the_model_as_its_own_draft_is_always_right(plain: CpuRunner, folder: Path, tmp_path: Path) -> None:
    runner = speculating(folder, folder, tmp_path, num_blocks=160)
    pair = Pair(runner, adaptive_speculation=False)
    made = requests()
    before = Pair(plain)
    assert pair.run(made) == before.run(made)
    assert pair.token_outputs == before.token_outputs
    counts = pair.scheduler.speculation.counts()
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 300
    assert pair.scheduler.load().num_steps < before.scheduler.load().num_steps
    runner.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_another_model_changes_no_text(plain: CpuRunner, folder: Path, tmp_path: Path, depth: int) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    write(draft, checkpoints.config_of(num_layers=1, vocab_size=280, max_position=100))
    runner = speculating(folder, draft, tmp_path)
    pair = Pair(runner, depth, adaptive_speculation=False)
    made = requests()
    assert pair.run(made) == Pair(plain).run(made)
    counts = pair.scheduler.speculation.counts()
    assert counts.num_draft_tokens > counts.num_accepted_tokens
    assert pair.scheduler.load().num_preemptions > 0
    runner.close()


def test_with_caches_in_8_bits_texts_are_the_same(folder: Path, tmp_path: Path) -> None:
    """Both caches, with proposals that are right and wrong: a wrong one must not change the scale of what follows."""
    made = requests()
    runners = [make_runner(folder, block_bytes(3, 2, 16, 1), 160, kv_dtype="int8")]
    runners.append(speculating(folder, folder, tmp_path, kv_dtype="int8"))
    try:
        before, pair = Pair(runners[0]), Pair(runners[1], adaptive_speculation=False)
        assert pair.run(made) == before.run(made)
        assert pair.token_outputs == before.token_outputs
        assert pair.scheduler.speculation.counts().num_accepted_tokens > 80
        assert pair.scheduler.load().num_preemptions > 0
    finally:
        for runner in runners:
            runner.close()


def test_what_is_proposed_depends_on_the_ids_of_a_row_alone(folder: Path, tmp_path: Path) -> None:
    """The KV of wrong proposals is computed again, also if ids were sampled in steps without proposals since."""
    runner = speculating(folder, folder, tmp_path)
    assert runner.speculator is not None
    table, proposer = runner.rows, runner.speculator.proposer
    ids = np.array(random_ids(30, 5), np.int32)
    table.add(0, 1, 0, ids, np.arange(4, dtype=np.int32), GenerationOptions(temperature=0.0), ())
    row, most = np.array([0], np.int32), np.array([4], np.int32)

    def propose() -> list[int]:
        return proposer.propose(row, most, time.monotonic)[0].tolist()

    first = propose()
    assert len(first) == 4
    for num_sampled in (4, 2, 0):
        known = int(table.num_ids[0])
        table.ids[0, known : known + num_sampled] = [(each + 1) % 256 for each in propose()[:num_sampled]]
        table.num_ids[0] += num_sampled
        found = propose(), propose()
        proposer.drop(row)
        assert (propose(), propose()) == found
    runner.close()


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    draft, _ = recurrent_models.write(tmp_path / "draft", recurrent_models.VARIANTS["qwen3_5"])
    settings = Settings(
        model="target",
        cache_dir=str(tmp_path),
        speculative=SpeculativeSettings(method="draft_model", draft=str(draft), num_speculative_tokens=4),
    )
    link = draft_link(settings)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(draft)
    with pytest.raises(UserError, match=r"speculative\.draft: .*\(qwen3_5_text\) has recurrent layers"):
        draft_block_bytes(settings)
