"""SmolLM2-135M-Instruct computes what transformers does in float32; tools/make_reference.py made the reference."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.kernels.step_inputs import BLOCK_SIZE
from tests.stages.execute.driver import Driver, row_add, settings

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "smollm2_reference.json").read_text())
PROMPTS: list[list[int]] = [prompt["ids"] for prompt in REFERENCE["prompts"]]
OUTPUTS: list[list[int]] = [prompt["output_ids"] for prompt in REFERENCE["prompts"]]
NUM_OUTPUTS = 48
CHUNK = 11

pytestmark = pytest.mark.timeout(600)


def make_driver(folder: Path, dtype: str) -> Driver:
    return Driver(folder, settings(dtype=dtype, kv_mib=256, max_num_seqs=129, tokens=1024))


@pytest.fixture(scope="module")
def exact(smollm2_dir: Path) -> Iterator[Driver]:
    """In float32."""
    yield make_driver(smollm2_dir, "float32")
    gc.collect()


@pytest.fixture(scope="module")
def default(smollm2_dir: Path) -> Iterator[Driver]:
    """In bfloat16."""
    yield make_driver(smollm2_dir, "bfloat16")
    gc.collect()


def compute_prefixes(driver: Driver, prompts: list[list[int]]) -> dict[str, Any]:
    """Compute each prompt's full blocks but the last id's, by a row of its own that is dropped then."""
    lengths = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    blocks = [driver.take_blocks(length) for length in lengths]
    for prompt, length, own in zip(prompts, lengths, blocks, strict=True):
        if length:
            row = driver.take_row()
            driver.step([(row, 0, length, False)], adds=[row_add(row, prompt[:length], own)])
    return {"shared": blocks, "cached": lengths}


def same(outputs: list[list[int]]) -> int:
    assert all(len(output) == NUM_OUTPUTS for output in outputs)
    return sum(output == expected for output, expected in zip(outputs, OUTPUTS, strict=True))


@pytest.mark.parametrize("cached", [False, True], ids=["computed", "cached"])
@pytest.mark.parametrize("chunk", [None, CHUNK], ids=["whole", "chunked"])
def test_twenty_prompts_at_once_go_on_as_the_reference_does(exact: Driver, chunk: int | None, cached: bool) -> None:
    exact.clear()
    prefixes = compute_prefixes(exact, PROMPTS) if cached else {}
    assert same(exact.generate(PROMPTS, NUM_OUTPUTS, chunk=chunk, **prefixes)) >= 19


def test_each_prompt_alone_goes_on_as_the_reference_does(exact: Driver) -> None:
    """Every other prompt is computed whole, the rest in chunks behind a cached prefix."""
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        exact.clear()
        how = {"chunk": CHUNK, **compute_prefixes(exact, [prompt])} if i % 2 else {}
        outputs += exact.generate([prompt], NUM_OUTPUTS, **how)
    assert same(outputs) >= 19


@pytest.mark.parametrize("together", [1, 128])
def test_bfloat16_finds_the_same_largest_logit_as_float32(default: Driver, together: int) -> None:
    """Teacher-forced on real text. Each position is a row of its own, over blocks that one row has computed."""
    num_same = num_positions = 0
    for text in REFERENCE["texts"]:
        ids, expected = text["ids"], text["argmax_ids"]
        default.clear()
        blocks = default.take_blocks(len(ids))
        default.step([(0, 0, len(ids), False)], adds=[row_add(0, ids, blocks)])
        for first in range(0, len(ids), together):
            positions = range(first, min(first + together, len(ids)))
            rows = range(1, 1 + len(positions))
            adds = [
                row_add(row, ids[: position + 1], blocks[: position // BLOCK_SIZE + 1])
                for row, position in zip(rows, positions, strict=True)
            ]
            entries = [(row, position, 1, True) for row, position in zip(rows, positions, strict=True)]
            sampled = default.step(entries, adds=adds).ids.tolist()
            num_same += sum(token == expected[position] for token, position in zip(sampled, positions, strict=True))
            default.step(drops=list(rows))
        num_positions += len(ids)
    assert num_positions >= 500
    assert num_same / num_positions >= 0.98
