"""As test_nan_architectures.py, for models with recurrent layers: a state that is not finite reaches no other row, nor
one that gets its slot or a snapshot of it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.exactness.test_nan_architectures import INFINITE, bad, good
from tests.stages.execute.exactness.test_nan_rows import outcome
from tests.stages.execute.pair import NUM_THREADS, Pair
from tests.stages.execute.recurrent_models import VARIANTS, make
from tests.stages.prepare import checkpoints

ALL = ["qwen3_5", "lfm2", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "lfm3"]
NAMES = ALL if os.environ.get("PIPELINE_ALL_CASES") else ALL[:2]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_not_finite_changes_no_other_row(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    model = make(replace(variant, changes={**variant.changes, "tie_word_embeddings": False}))
    with torch.no_grad():
        model.get_input_embeddings().weight[INFINITE] = torch.inf
    source = checkpoints.save_folder(tmp_path / "source", model)
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))
    execute = ExecuteSettings(dtype="bfloat16", kv_cache_bytes=4 * 1024**2, num_threads=NUM_THREADS)
    schedule = ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=96)
    runner = CpuRunner(Settings(execute=execute, schedule=schedule), folder)
    try:
        found = []
        for others in ((), bad(), ()):
            pair = Pair(runner, 1, max_num_batched_tokens=96)
            requests = good()
            found.append(outcome(pair, pair.run([*requests, *others]), len(requests)))
            errors = {index for index in pair.errors if index[0] > len(requests)}
            assert len(errors) == len(others)
            assert set(pair.errors.values()) <= {m.NAN_LOGITS}
        assert not found[0][-1]
        assert found[1] == found[0], "beside them"
        assert found[2] == found[0], "after them, in their slots"
    finally:
        runner.close()
