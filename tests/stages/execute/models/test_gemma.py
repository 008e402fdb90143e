"""A real Gemma 3 in Q4_K_M: its text makes sense, and its most likely tokens are those of its values in float32.

These tests are collected only if the model's file is there: `.venv/bin/python -m tools.models.fetch_test_models
gemma-270m`. They take about half a minute, and 3 GB of memory.
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pipeline.cli.check.chunks import chunks_of
from pipeline.cli.check.fidelity import BUILT_IN
from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.measuring import fidelity
from pipeline.stages.prepare.check_model.text_tokens import encode
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.native_driver import ISAS, Native
from tools.models.fetch_test_models import FOLDER, MODELS

NUM_POSITIONS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return prepare(Settings(model=str(FOLDER / MODELS["gemma-270m"].file), cache_dir=str(cache)))


def test_its_layers_are_those_of_gemma_3(folder: Path) -> None:
    config = ModelConfig.load(folder)
    assert [i for i in range(config.num_layers) if config.window_of(i) is None] == [5, 11, 17]
    full, sliding = config.rope_of(5), config.rope_of(0)
    assert full is not None and sliding is not None and (full.theta, sliding.theta) == (1e6, 1e4)


def test_it_continues_a_text_sensibly(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    driver = Native(folder, ISAS[0], False, kv_mib=64, max_num_seqs=4)
    (ids,) = driver.generate([tokenizer.encode("Once upon a time, there was a little").ids], 1)
    assert tokenizer.decode(ids) == " girl"
    driver.runner.close()


def test_its_most_likely_tokens_are_those_of_float32(folder: Path) -> None:
    ids, bos_id = encode(folder, BUILT_IN.read_text("utf-8"))
    chunk = chunks_of(ids, bos_id, "the built-in text")[0][:NUM_POSITIONS]
    measured = fidelity.measure(Settings(), folder, [chunk], lambda _: None)
    assert measured.programs[0].divergence.summary().top1 >= 0.97
