"""A KV cache in 8 bits on a GPU, whose kernels are interpreted."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import block_bytes
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.driver import CudaDriver
from tests.stages.execute.driver import Driver, row_add

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

PROMPT = [5, 9, 200, 31, 7, 44, 8, 100, 3, 61, 12, 250, 90, 17, 33, 81, 4, 29]
BLOCK_BYTES = block_bytes(2, 2, 16, 1)


def in_8_bits(config: Settings) -> Settings:
    return msgspec.structs.replace(config, execute=msgspec.structs.replace(config.execute, kv_dtype="int8"))


def test_it_computes_nearly_what_the_cpu_does_in_chunks_and_after_a_swap(slight_dir: Path) -> None:
    config = on_device(max_num_seqs=2, tokens=32)
    expected = Driver(slight_dir, in_8_bits(on_cpu(config)))
    ids = expected.generate([PROMPT], 3)[0]
    exact = Driver(slight_dir, on_cpu(config))
    exact.generate([PROMPT], 3)
    quantization = np.abs(exact.logits() - expected.logits()).max()
    assert 0 < quantization < 0.1, "8 bits change numbers, by little"

    ours = CudaDriver(slight_dir, in_8_bits(config), 3 * BLOCK_BYTES)
    assert (ours.runner.facts.kv_dtype, ours.runner.facts.num_swap_blocks) == ("int8", 3)
    assert ours.runner.kv.nbytes == ours.runner.facts.num_blocks * BLOCK_BYTES
    # A chunk, a chunk behind it, and a decode step; then both blocks go to swap space and come back elsewhere.
    ours.step([(0, 0, 11, False)], adds=[row_add(0, PROMPT, [1, 3])])
    made = ours.step([(0, 11, 7, True)]).ids.tolist()
    made += ours.step([(0, 18, 1, True)]).ids.tolist()
    slots = [ours.runner.facts.num_blocks + i for i in range(2)]
    ours.step(drops=[0], copies=list(zip([1, 3], slots, strict=True)))
    known = [*PROMPT, *made]
    last = ours.step(
        [(1, 19, 1, True)],
        adds=[row_add(1, known, [6, 2], num_prompt=len(PROMPT), generation=2)],
        copies=list(zip(slots, [6, 2], strict=True)),
    )
    assert made + last.ids.tolist() == ids
    # A number at the border of two codes gets either.
    np.testing.assert_allclose(ours.logits()[:1], expected.logits()[:1], atol=0.1)
