"""In every architecture, a row whose numbers are not finite changes nothing of the rows beside it and of those after
it: experts that compute tokens of several rows together, windows, ALiBi, norms, softcaps and shared scratch memory."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.exactness.test_nan_rows import outcome
from tests.stages.execute.native_driver import ISAS, emulation, random_ids
from tests.stages.execute.pair import NUM_THREADS, Pair, Request
from tests.stages.execute.tiny_architectures import VARIANTS, make
from tests.stages.prepare import checkpoints

INFINITE = 290
"""A token whose embedding is not finite."""
NAMES = list(VARIANTS) if os.environ.get("PIPELINE_ALL_CASES") else ["qwen2_moe", "gpt_oss"]
KERNELS = [ISAS[0], "torch"]


def folder_of(path: Path, name: str) -> Path:
    """With embeddings that the head does not share: else every row would have the infinite ones in its logits."""
    variant = VARIANTS[name]
    model = make(replace(variant, changes={**variant.changes, "tie_word_embeddings": False}))
    with torch.no_grad():
        model.get_input_embeddings().weight[INFINITE] = torch.inf
    source = checkpoints.save_folder(path / "source", model)
    return prepare(Settings(model=str(source), cache_dir=str(path / "cache")))


def good() -> list[Request]:
    """None of them samples that token."""
    no_infinite = ("bad_words_ids", ((INFINITE,),))
    pooled = (("pooling", int(m.Pooling.MEAN)),)
    return [
        Request(tuple(random_ids(5, 1)), 30, fields=(no_infinite, ("num_logprobs", 2))),
        Request(tuple(random_ids(40, 2)), 20, seed=3, n=2, at_step=3, fields=(no_infinite, ("num_logprobs", 3))),
        Request(tuple(random_ids(70, 3)), 20, at_step=2, fields=(no_infinite, ("num_prompt_logprobs", 1))),
        Request(tuple(random_ids(33, 4)), 1, at_step=4, fields=pooled),
        Request(tuple(random_ids(9, 5)), 30, seed=4, at_step=7, fields=(no_infinite, ("repetition_penalty", 1.2))),
    ]


def bad() -> list[Request]:
    """They begin beside each of the others, with the token at their begin, within and at their end."""
    return [
        Request((*random_ids(before, 10 + at), INFINITE, *random_ids(behind, 20 + at)), 4, at_step=at)
        for at, (before, behind) in enumerate([(0, 20), (3, 0), (30, 18), (17, 17), (0, 0), (61, 2), (1, 1), (5, 40)])
    ]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_changes_no_other(tmp_path: Path, name: str, kernels: str) -> None:
    folder = folder_of(tmp_path, name)
    how: Any
    with emulation(kernels) as how:
        execute = ExecuteSettings(dtype="bfloat16", kernels=how, kv_cache_bytes=2 * 1024**2, num_threads=NUM_THREADS)
        schedule = ScheduleSettings(max_num_seqs=16, max_num_batched_tokens=96)
        settings = Settings(max_model_len=VARIANTS[name].max_model_len, execute=execute, schedule=schedule)
        runner = CpuRunner(settings, folder)
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
        assert found[2] == found[0], "after them, in their blocks"
    finally:
        runner.close()
