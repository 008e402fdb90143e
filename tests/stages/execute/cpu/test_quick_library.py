"""The quick library, which a first start computes with, has the bits of the optimized one, which the next start loads:
a stream may go on at a replica that has the other. Not emulated levels: those are compiled with -O1 always."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.kernels.cpu import build, compiler
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime import messages as m
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import GREEDY
from tests.stages.execute.native_driver import Native, random_ids, write

FORMATS: tuple[tuple[Format, ...], ...] = (
    ("bf16",), ("q8_0",), ("q4_1",), ("q4_0", "q5_0", "q5_1"), ("q4_k", "q5_k", "q6_k"),
)  # fmt: skip
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "head_dim": 64, "num_layers": 2}
PROMPTS = [random_ids(length, length) for length in (1, 17, 70)]
SAMPLED = m.GenerationOptions(temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)
OPTIMIZED = build.build
pytestmark = pytest.mark.timeout(1200)
"""A compile takes a core half a minute."""


def compile_quickly(*args: Any, **options: Any) -> Path:
    """The quick library, although the optimized one is in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *compiler.QUICK))
        return OPTIMIZED(*args, **options | {"quick": False})


def computed(folder: Path, isa: str, how: dict[str, Any]) -> list[np.ndarray]:
    """Ids and logits of greedy and of sampled texts, alone and in a batch, in chunks."""
    driver = Native(folder, isa, **how)
    found: list[np.ndarray] = []
    for options in (GREEDY, SAMPLED):
        for prompts, chunk in ((PROMPTS, None), (PROMPTS[-1:], 33)):
            found.append(np.array(driver.generate(prompts, 6, chunk=chunk, options=options)))
            found.append(driver.logits().view(np.uint32))
            driver.clear()
    driver.runner.close()
    return found


@pytest.mark.parametrize("how", [{}, {"kv_dtype": "int8"}], ids=["bf16 keys", "int8 keys"])
@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("isa", available())
def test_a_quick_library_computes_the_same_bits(
    isa: str, formats: tuple[Format, ...], how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, checkpoints.config_of(**SHAPE), formats)
    expected = computed(tmp_path, isa, how)
    monkeypatch.setattr(build, "build", compile_quickly)
    loaded = computed(tmp_path, isa, how)
    assert all(np.array_equal(one, other) for one, other in zip(expected, loaded, strict=True))
