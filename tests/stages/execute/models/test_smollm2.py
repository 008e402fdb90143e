"""SmolLM2-135M-Instruct agrees with transformers in float32; tools/models/make_reference.py made the reference."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Quantization, Settings
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.pair import NUM_THREADS

REFERENCE = json.loads((Path(__file__).parents[3] / "data" / "smollm2_reference.json").read_text())
PROMPTS: list[list[int]] = [prompt["ids"] for prompt in REFERENCE["prompts"]]
OUTPUTS: list[list[int]] = [prompt["output_ids"] for prompt in REFERENCE["prompts"]]
ALL = bool(os.environ.get("PIPELINE_ALL_CASES"))
NUM_OUTPUTS = 48 if ALL else 12
CHUNK = 11

pytestmark = pytest.mark.timeout(600)


LEAST_AGREEMENT: dict[Quantization, float] = {"none": 0.985, "q8_0": 0.965, "auto": 0.99}
"""Agreement of the CPU kernels with float32, by format: bfloat16, 8 bits, and the file's own, 4 bits. q8_0 loses
most, because it rounds weights that were rounded to 4 bits before."""
NUM_ALONE = 16 if ALL else 4
ALONE = range(0, len(PROMPTS), 5) if ALL else (0, 5)
"""Prompts that are also computed alone, for so many outputs: these take longest."""


def make_driver(folder: Path, dtype: str, kernels: str = "auto") -> Driver:
    return Driver(
        folder, settings(dtype=dtype, kernels=kernels, kv_mib=256, max_num_seqs=129, tokens=1024, threads=NUM_THREADS)
    )


@pytest.fixture(scope="module")
def exact(smollm2_dir: Path) -> Iterator[Driver]:
    """In float32."""
    yield make_driver(smollm2_dir, "float32")
    gc.collect()


@pytest.fixture(scope="module")
def rounded() -> Iterator[Driver]:
    """In bfloat16, in torch."""
    driver = make_driver(prepare(Settings(quantization="none")), "bfloat16", "torch")
    assert isinstance(driver.runner.program, TorchProgram)
    yield driver
    gc.collect()


@pytest.fixture(scope="module", params=LEAST_AGREEMENT)
def quantization(request: pytest.FixtureRequest) -> Quantization:
    return request.param


@pytest.fixture(scope="module")
def native(quantization: Quantization) -> Iterator[Driver]:
    """In the best kernels of this machine."""
    driver = make_driver(prepare(Settings(quantization=quantization)), "bfloat16")
    assert isinstance(driver.runner.program, NativeProgram)
    yield driver
    driver.runner.close()


def compute_prefixes(driver: Driver, prompts: list[list[int]]) -> dict[str, Any]:
    """Compute all full blocks of each prompt except the last id's, in separate rows that are then dropped."""
    lengths = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    blocks = [driver.take_blocks(length) for length in lengths]
    for prompt, length, own in zip(prompts, lengths, blocks, strict=True):
        if length:
            row = driver.take_row()
            driver.step([(row, 0, length, False)], adds=[row_add(row, prompt[:length], own)])
    return {"shared": blocks, "cached": lengths}


def num_different(outputs: list[list[int]], expected: list[list[int]]) -> int:
    return sum(output != reference for output, reference in zip(outputs, expected, strict=True))


def generate_together(driver: Driver) -> list[list[int]]:
    """The outputs of all prompts in one batch. Every other prompt is computed whole, the rest in chunks after a cached
    prefix."""
    driver.clear()
    later = compute_prefixes(driver, PROMPTS[1::2])
    shared: list[list[int]] = [[] for _ in PROMPTS]
    cached, chunks = [0] * len(PROMPTS), [None, CHUNK] * (len(PROMPTS) // 2)
    shared[1::2], cached[1::2] = later["shared"], later["cached"]
    return driver.generate(PROMPTS, NUM_OUTPUTS, chunk=chunks, shared=shared, cached=cached)


def generate_alone(driver: Driver) -> list[list[int]]:
    """The same of the prompts of ALONE, one after the other, and shorter."""
    outputs = []
    for i in ALONE:
        driver.clear()
        how = {"chunk": CHUNK, **compute_prefixes(driver, [PROMPTS[i]])} if i % 2 else {}
        outputs += driver.generate([PROMPTS[i]], NUM_ALONE, **how)
    return outputs


def test_twenty_prompts_at_once_continue_like_the_reference(exact: Driver) -> None:
    assert num_different(generate_together(exact), [ids[:NUM_OUTPUTS] for ids in OUTPUTS]) <= 1


def test_a_prompt_alone_continues_like_the_reference(exact: Driver) -> None:
    assert num_different(generate_alone(exact), [OUTPUTS[i][:NUM_ALONE] for i in ALONE]) <= len(ALONE) // 4


def agreement(driver: Driver, together: int, num_texts: int = 7) -> float:
    """How often the largest logit is that of float32, teacher-forced on real text. Each position is a separate row over
    blocks that one row has computed, with `together` of them per step."""
    num_same = num_positions = 0
    for text in REFERENCE["texts"][:num_texts]:
        ids, expected = text["ids"], text["argmax_ids"]
        driver.clear()
        blocks = driver.take_blocks(len(ids))
        driver.step([(0, 0, len(ids), False)], adds=[row_add(0, ids, blocks)])
        for first in range(0, len(ids), together):
            positions = range(first, min(first + together, len(ids)))
            rows = range(1, 1 + len(positions))
            adds = [
                row_add(row, ids[: position + 1], blocks[: position // BLOCK_SIZE + 1])
                for row, position in zip(rows, positions, strict=True)
            ]
            entries = [(row, position, 1, True) for row, position in zip(rows, positions, strict=True)]
            sampled = driver.step(entries, adds=adds).ids.tolist()
            num_same += sum(token == expected[position] for token, position in zip(sampled, positions, strict=True))
            driver.step(drops=list(rows))
        num_positions += len(ids)
    assert num_positions >= 130 * num_texts
    return num_same / num_positions


@pytest.mark.parametrize(("together", "num_texts"), [(1, 1), (128, 3)], ids=["alone", "together"])
def test_bfloat16_finds_the_same_largest_logit_as_float32(rounded: Driver, together: int, num_texts: int) -> None:
    """On one text if each position is a step of its own, because torch is slow then."""
    assert agreement(rounded, together, num_texts) >= 0.98


def test_the_cpu_kernels_find_the_same_largest_logit_as_float32(native: Driver, quantization: Quantization) -> None:
    assert agreement(native, 128) >= LEAST_AGREEMENT[quantization]


def test_the_cpu_kernels_generate_the_same_alone_and_in_a_batch_of_twenty(native: Driver) -> None:
    native.clear()
    together = native.generate(PROMPTS, NUM_ALONE, chunk=101)
    assert generate_alone(native) == [together[i] for i in ALONE]
