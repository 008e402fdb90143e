"""EAGLE heads on a GPU runner, with interpreted kernels: they propose what their formulas say, and change no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import IntArray, block_bytes
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.drafts.eagle import prepare_head
from pipeline.stages.prepare.stage import SILENT
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.drafts import test_eagle, test_eagle3
from tests.stages.execute.driver import i32, make_step, row_add, take
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import Pair, Request

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

LIMITS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 20}
NUM_BLOCKS = 30
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (test_eagle, {}),
    "eagle3": (test_eagle3, {}),
    "eagle3, all ids": (test_eagle3, test_eagle3.FULL),
}
WARM = ("temperature", 0.8)
REQUESTS = [
    Request(tuple(random_ids(21, 1)), 5),  # in chunks
    Request(tuple(random_ids(5, 2)), 4, at_step=2),
    Request(tuple(random_ids(4, 3)), 4, 3, at_step=3, fields=(WARM, ("num_logprobs", 1))),
]


def settings_of(folder: Path, head: Path, cache: Path) -> Settings:
    """For a GPU, with room for `NUM_BLOCKS` of both caches."""
    num_bytes = block_bytes(3, 2, 16, 4) + block_bytes(1, 1, 16, 4)
    config = on_device(max_num_seqs=3, tokens=20, kv_bytes=NUM_BLOCKS * num_bytes)
    speculative = SpeculativeSettings(method="eagle", draft=str(head), num_speculative_tokens=3)
    config = msgspec.structs.replace(config, model=str(folder), cache_dir=str(cache), speculative=speculative)
    draft.link(config, prepare_head(config, folder, SILENT), SILENT)
    return config


@pytest.mark.parametrize("kind", HEADS)
def test_it_proposes_what_its_formula_says_and_changes_no_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are in flight, and prompts are read in chunks."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, test_eagle.CONFIG)
    module, changes = HEADS[kind]
    head = module.write_head(tmp_path / "head", **changes)
    runner = CudaRunner(settings_of(folder, head, tmp_path), folder)
    assert runner.facts.num_blocks == NUM_BLOCKS, "both caches have as many blocks"
    assert runner.speculator is not None
    proposer = runner.speculator.proposer
    asked: list[tuple[list[int], list[int]]] = []
    propose = proposer.propose

    def noting(rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        found = propose(rows, most, clock)
        for row, ids in zip(rows.tolist(), found, strict=True):
            if not runner.rows.temperature[row]:
                asked.append((runner.rows.ids[row, : runner.rows.num_ids[row]].tolist(), ids.tolist()))
        return found

    monkeypatch.setattr(proposer, "propose", noting)
    pair = Pair(runner, 2, adaptive_speculation=False, prefix_caching=False, **LIMITS)  # type: ignore[arg-type]
    texts = pair.run(REQUESTS)
    runner.close()
    plain = CpuRunner(on_cpu(on_device(max_num_seqs=3, tokens=20)), folder)
    assert texts == Pair(plain, **LIMITS).run(REQUESTS)
    plain.close()
    assert sum(len(ids) for _, ids in asked) >= 10
    for known, ids in asked:
        assert ids == module.proposed_by_formula(known, folder, head, len(ids))


def test_a_step_with_many_changes_of_rows_may_let_the_head_read_a_prompt(tmp_path: Path) -> None:
    """A step's message is read while a prompt is in flight, and its long new prompts don't fit into the words of one
    step of the head, which reads the hidden states of the prompt before the step's own words are sent."""
    folder, num_blocks = tmp_path / "model", 300
    folder.mkdir()
    write(folder, msgspec.structs.replace(test_eagle.CONFIG, max_position=4400))
    head = test_eagle.write_head(tmp_path / "head", max_position_embeddings=4400)
    plain = settings_of(folder, head, tmp_path)
    num_bytes = block_bytes(3, 2, 16, 4) + block_bytes(1, 1, 16, 4)
    execute = msgspec.structs.replace(plain.execute, kv_cache_bytes=num_blocks * num_bytes)
    limits = msgspec.structs.replace(plain.schedule, max_num_seqs=4, max_num_batched_tokens=40)
    runner: Any = CudaRunner(msgspec.structs.replace(plain, execute=execute, schedule=limits), folder)
    runs: list[int] = []
    run = runner.speculator.proposer._run

    def noting(rows: IntArray, starts: IntArray, counts: IntArray, hidden: Any, samples: Any) -> Any:
        runs.append(sum(len(numbers) for _, numbers in runner._device_rows.runs))
        return run(rows, starts, counts, hidden, samples)

    runner.speculator.proposer._run = noting
    runner.launch(make_step([(0, 0, 3, True)], adds=[row_add(0, [5, 9, 7], [0])]), take)
    first = runner.collect()
    prompt = random_ids(40, 1)
    runner.launch(make_step([(1, 0, 40, True)], adds=[row_add(1, prompt, [1, 2, 3])], step_id=1), take)
    long = [random_ids(4200, seed) for seed in (2, 3)]
    adds = [row_add(row, ids, [row + 2]) for row, ids in enumerate(long, 2)]
    runner.launch(msgspec.structs.replace(make_step([(0, 3, 1, True)], adds=adds, step_id=2), drafts=i32([2])), take)
    assert max(runs) > runner.speculator.proposer.steps._staging.capacity
    *_, last = runner.drain()
    assert len(last.num_ids) == 1 and last.finishes.tolist() == [Finish.NONE]
    on_device = runner._device_rows.on_device.ids
    for row, ids in enumerate(long, 2):
        assert on_device[row, :4200].tolist() == ids
    assert on_device[1, :41].tolist() == [*prompt, runner.rows.ids[1, 40]]
    assert first.ids[0] == runner.rows.ids[0, 3]
    runner.close()
