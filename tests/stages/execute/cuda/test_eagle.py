"""EAGLE heads on a GPU runner, with interpreted kernels: they propose what their formulas say, and change no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import IntArray, block_bytes
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.prepare import draft
from pipeline.stages.prepare.eagle import prepare_head
from pipeline.stages.prepare.stage import SILENT
from tests.stages.execute import test_eagle, test_eagle3
from tests.stages.execute.cuda.conftest import on_cpu, on_device
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
