"""A real model in Q4_K_M keeps its formats, is close to its values in float32, and writes sensible text.

These tests are collected only if the model's file is there: `.venv/bin/python -m tools.models.fetch_test_models
qwen-1.5b`. They take about a minute, and 4 GB of memory. `pipeline check-model --fidelity` measures more positions.
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pipeline.cli.check.chunks import chunks_of
from pipeline.cli.check.fidelity import BUILT_IN
from pipeline.config.settings import Settings
from pipeline.runtime.model.model_folder import CONVERTED
from pipeline.stages.execute.cpu.measuring import fidelity
from pipeline.stages.prepare.check_model.text_tokens import encode
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.native_driver import ISAS, Native
from tools.models.fetch_test_models import FOLDER, MODELS

NUM_POSITIONS = 256
QUESTION = "<|im_start|>user\nWhat is the capital of France? Answer with one word.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return prepare(Settings(model=str(FOLDER / MODELS["qwen-1.5b"].file), cache_dir=str(cache)))


def test_it_writes_sensible_text_with_the_formats_of_the_file(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    driver = Native(folder, ISAS[0], False, kv_mib=64, max_num_seqs=4)
    (ids,) = driver.generate([tokenizer.encode(QUESTION).ids], 3)
    assert tokenizer.decode(ids).startswith("Paris")
    assert driver.runner.weight_formats == "q4_k+q6_k"
    assert not (folder / CONVERTED).exists()
    driver.runner.close()


def test_its_most_likely_tokens_are_those_of_float32(folder: Path) -> None:
    ids, bos_id = encode(folder, BUILT_IN.read_text("utf-8"))
    chunk = chunks_of(ids, bos_id, "the built-in text")[0][:NUM_POSITIONS]
    measured = fidelity.measure(Settings(), folder, [chunk], lambda _: None)
    found = {program.activations: program.divergence.summary() for program in measured.programs}
    by_default, int8 = measured.programs[0].activations, found.pop("int8")
    (more_bits,) = found.values()
    assert (by_default == "int8") == ("amx" not in measured.kernels)  # most of the file has at most five bits
    assert more_bits.top1 > 0.985 and more_bits.mean_kl < 0.2 * int8.mean_kl
    assert int8.top1 > 0.95
