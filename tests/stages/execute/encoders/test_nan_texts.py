"""A text whose numbers are not finite changes nothing of the texts beside it in a step, and of those after it in memory
that all layers and all texts use in turn."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.runtime.messages import Pooling
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, Texts, make, random_ids
from tests.stages.execute.native_driver import ISAS, emulation
from tests.stages.prepare import checkpoints

INFINITE, HUGE = 600, 601
"""Tokens whose embeddings are not finite, or overflow when they are multiplied, unless a norm is first."""
GOOD = [random_ids(num, num) for num in (40, 1, 17, 99, 16)]
CASES = [(name, isa) for name in VARIANTS for isa in (*ISAS, "torch")]
if not os.environ.get("PIPELINE_ALL_CASES"):
    CASES = [("bert, sequence", ISAS[0]), ("gemma3, bidirectional", ISAS[-1]), ("modernbert, tokens", "torch")]


def folder_of(path: Path, name: str) -> Path:
    model = make(VARIANTS[name])
    with torch.no_grad():
        model.get_input_embeddings().weight[INFINITE] = torch.inf
        model.get_input_embeddings().weight[HUGE] = 3e38
        model.get_input_embeddings().weight[HUGE, ::2] = -3e38  # else a norm takes away what is equal
    source = checkpoints.save_folder(
        path / "source", model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    return prepare(Settings(model=str(source), cache_dir=str(path / "cache")))


def bad(token: int) -> list[list[int]]:
    """With the token at the begin, within and at the end."""
    around = [(0, 20), (3, 0), (9, 30), (0, 0), (15, 1)]
    return [[*random_ids(before, 1), token, *random_ids(behind, 2)] for before, behind in around]


@pytest.mark.parametrize(("name", "isa"), CASES)
def test_a_text_that_is_not_finite_changes_no_other(tmp_path: Path, name: str, isa: str) -> None:
    good = [[token % INFINITE for token in ids] for ids in GOOD]
    with emulation(isa) as kernels:
        how = settings(dtype="bfloat16", kernels=kernels, kv_mib=2, tokens=512, max_num_seqs=16)
        computed = Texts(folder_of(tmp_path, name), how)
    for pooling in {computed.pooling, Pooling.ALL}:
        alone = [computed.compute([ids], pooling)[0] for ids in good]
        assert all(np.isfinite(one).all() for one in alone)
        for token in (INFINITE, HUGE):
            pairs = [text for pair in zip(bad(token), good, strict=True) for text in pair]
            together = computed.compute(pairs, pooling)
            assert token == HUGE or not np.isfinite(together[0]).all()
            for one, other in zip(together[1::2], alone, strict=True):
                np.testing.assert_array_equal(one, other)
            after = computed.compute(good, pooling)
            for one, other in zip(after, alone, strict=True):
                np.testing.assert_array_equal(one, other)
