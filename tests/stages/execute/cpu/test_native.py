"""Whole models in the CPU library agree with torch, and a row's numbers do not depend on its batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pipeline.kernels.attention import rotary
from pipeline.kernels.attention.kv_layout import LayerKV
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from tests.stages.execute import checkpoints
from tests.stages.execute.cpu.native_models import DRAWN, GROUPED_SHAPE, MAX_ERROR, SUPER_BLOCK_SHAPE, max_error
from tests.stages.execute.driver import GREEDY, Driver, row_add, settings
from tests.stages.execute.exactness.step_cases import StepCases, compute_in_chunks
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: changes for name, changes in checkpoints.VARIANTS.items() if changes.get("head_dim", 16) % 16 == 0},
    "one kv head of seven": {"num_kv_heads": 1, "num_heads": 7, "head_dim": 32, "hidden_size": 56},
    "wide heads": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 1},
    "odd sizes": {"hidden_size": 42, "intermediate_size": 70, "vocab_size": 299, "max_position": 250},
}
FORMATS: dict[str, list[Format]] = {
    **{format: [format] for format in ("bf16", "q8_0", "q4_0", "q4_1")},
    "mixed": ["q4_0", "bf16", "q8_0", "q4_1", "q4_0"],
    "fp8": ["fp8", "fp8", "q4_0", "fp8", "bf16"],
    "k-quants": ["q4_k", "q6_k", "q5_k", "q5_0", "q8_0", "q5_1", "q6_k", "q4_k"],
}
"""Of a model's matrices, in turn. In the mixed ones, queries, keys and values differ, and so do gate and up."""
FILTERED = m.GenerationOptions(temperature=1.2, top_k=30, top_p=0.9, seed=5, ignore_eos=True)


class Reference:
    """The torch program in float32, but with bfloat16 keys and values as in the library."""

    def __init__(self, folder: Path) -> None:
        def write_rounded(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: LayerKV) -> None:
            rotary.rotary_write(qkv, cos, sin, slots, kv)
            for part in (kv.keys, kv.values):
                part.copy_(part.bfloat16())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rotary, "rotary_write", write_rounded)
            self._driver = Driver(folder, settings(kernels="torch", max_num_seqs=128, kv_mib=4))
        assert isinstance(self._driver.runner.program, TorchProgram)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: tuple[int, ...]) -> np.ndarray:
        """The logits after `ids`, [vocab_size]; those of all prefixes are computed with them."""
        if ids not in self._known:
            driver = self._driver
            driver.clear()
            blocks = driver.take_blocks(len(ids))
            driver.step([(0, 0, len(ids), False)], adds=[row_add(0, list(ids), blocks)])
            positions = range(len(ids))
            adds = [row_add(1 + i, list(ids[: i + 1]), blocks[: i // BLOCK_SIZE + 1]) for i in positions]
            driver.step([(1 + i, i, 1, True) for i in positions], adds=adds)
            for i, logits in enumerate(driver.logits()):
                self._known.setdefault(ids[: i + 1], logits)
        return self._known[ids]


class Checked:
    """A driver of the library that keeps all logits, to compare them with the reference."""

    def __init__(self, folder: Path, reference: Reference, isa: str, **how: Any) -> None:
        self.driver = Native(folder, isa, **how)
        self.reference = reference
        self.max_error = max_error(isa)
        self.made: list[tuple[tuple[int, ...], np.ndarray]] = []

    def step(self, entries: list[tuple[int, int, int, bool]], adds: Any = ()) -> None:
        result = self.driver.step(entries, adds=adds)
        table = self.driver.runner.rows
        sampling = [entry for entry in entries if entry[3]]
        for (row, start, count, _), logits, token in zip(sampling, self.driver.logits(), result.ids, strict=True):
            assert token == logits.argmax()
            self.made.append((tuple(table.ids[row, : start + count].tolist()), logits))

    def compare(self) -> int:
        """Compare all kept logits. Returns how many rows that were."""
        made = sorted(self.made, key=lambda one: -len(one[0]))
        for ids, logits in made:
            expected = self.reference.logits(ids)
            assert expected.std() > 100 * MAX_ERROR["wide"]
            np.testing.assert_allclose(logits, expected, rtol=0, atol=self.max_error)
        return len(made)


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=[*VARIANTS])
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("variant")
    write(folder, checkpoints.config_of(**request.param))
    return folder, Reference(folder)


@pytest.fixture(scope="module", params=ISAS)
def shared(variant: tuple[Path, Reference], request: pytest.FixtureRequest) -> Iterator[Checked]:
    checked = Checked(*variant, request.param)
    yield checked
    checked.driver.runner.close()


@pytest.fixture
def model(shared: Checked) -> Checked:
    shared.driver.clear()
    shared.made = []
    return shared


# --- logits agree with the reference


class TestSteps(StepCases):
    pass


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_a_prompt_in_chunks(model: Checked, chunk: int) -> None:
    compute_in_chunks(model, chunk)


def test_rows_of_all_kinds_in_one_step(model: Checked) -> None:
    lengths = [40, 3, 17, 64, 30]
    adds = [row_add(row, random_ids(num, row), model.driver.take_blocks(90)) for row, num in enumerate(lengths)]
    model.step([(0, 0, 40, True), (1, 0, 3, True), (2, 0, 9, False)], adds)
    model.step([(1, 3, 1, True), (0, 40, 1, True), (2, 9, 8, True), (3, 0, 50, False), (4, 0, 30, True)])
    model.step([(4, 30, 1, True), (0, 41, 1, True), (2, 17, 1, True), (1, 4, 1, True), (3, 50, 14, True)])
    assert model.compare() == 2 + 4 + 5


# --- numbers are the same in every batch


@pytest.fixture(scope="module", params=FORMATS.values(), ids=[*FORMATS])
def grouped_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    shape = SUPER_BLOCK_SHAPE if "q4_k" in request.param or "fp8" in request.param else GROUPED_SHAPE
    write(folder, checkpoints.config_of(**shape), request.param)
    return folder


@pytest.fixture(scope="module")
def grouped_reference(grouped_dir: Path) -> Reference:
    return Reference(grouped_dir)


@pytest.fixture(scope="module", params=ISAS)
def native(grouped_dir: Path, request: pytest.FixtureRequest) -> Iterator[Native]:
    driver = Native(grouped_dir, request.param)
    yield driver
    driver.runner.close()


@pytest.fixture
def driver(native: Native) -> Native:
    native.clear()
    return native


@pytest.mark.parametrize(("activations", "bound"), [("int12", 0.025), ("auto", 0.07)])
@pytest.mark.parametrize("isa", ISAS)
def test_quantized_models_are_close_to_their_dequantized_weights(
    grouped_dir: Path, grouped_reference: Reference, isa: str, activations: str, bound: float
) -> None:
    """8-bit activations in every group cost a few hundredths over three layers, 12 bits and bfloat16 a tenth of it."""
    driver = Native(grouped_dir, isa, activations=activations)
    ids = random_ids(60, 11)
    driver.step([(0, 0, 60, False)], adds=[row_add(0, ids, driver.take_blocks(60))])
    rows = range(1, 13)
    adds = [row_add(row, ids[: 5 * row], [0, 1, 2, 3][: -(-5 * row // BLOCK_SIZE)]) for row in rows]
    driver.step([(row, 5 * row - 1, 1, True) for row in rows], adds=adds)
    expected = np.array([grouped_reference.logits(tuple(ids[: 5 * row])) for row in rows])
    error = driver.logits() - expected
    driver.runner.close()
    assert np.sqrt((error**2).mean()) < bound * expected.std()


def test_logits_have_the_same_bits_alone_batched_chunked_and_with_a_cached_prefix(driver: Native) -> None:
    prompts = [random_ids(num, num) for num in (70, 1, 33, 64, 5, 16)]

    def last_logits(which: list[int], chunk: int) -> dict[int, np.ndarray]:
        driver.clear()
        adds = [row_add(row, prompts[i], driver.take_blocks(80)) for row, i in enumerate(which)]
        driver.step(adds=adds)
        logits = {}
        for start in range(0, 70, chunk):
            entries, ends = [], []
            for row, i in enumerate(which):
                count = min(chunk, len(prompts[i]) - start)
                if count > 0:
                    entries.append((row, start, count, start + count == len(prompts[i])))
                    ends += [i] if entries[-1][3] else []
            if entries:
                driver.step(entries)
                logits |= dict(zip(ends, driver.logits(), strict=True))
        return logits

    alone = {i: last_logits([i], 70)[i] for i in range(6)}
    for which, chunk in [([0, 1, 4], 70), ([5, 4, 3, 2, 1, 0], 19), ([1, 0, 2, 3, 4, 5], 1), ([3, 3, 3, 2], 16)]:
        for i, logits in last_logits(which, chunk).items():
            np.testing.assert_array_equal(logits, alone[i])
    driver.clear()
    blocks = driver.take_blocks(48)
    driver.step([(0, 0, 48, False)], adds=[row_add(0, prompts[0][:48], blocks)])
    adds = [row_add(1, prompts[0], blocks + driver.take_blocks(32)), row_add(2, prompts[4], driver.take_blocks(16))]
    driver.step([(2, 0, 5, True), (1, 48, 22, True)], adds=adds)
    np.testing.assert_array_equal(driver.logits(), [alone[4], alone[0]])


@pytest.mark.parametrize("options", [GREEDY, DRAWN, FILTERED], ids=["greedy", "drawn", "filtered"])
def test_texts_are_the_same_alone_batched_chunked_and_after_a_preemption(
    driver: Native, options: m.GenerationOptions
) -> None:
    prompts = [random_ids(num, num) for num in (40, 3, 17, 25, 31)]
    alone = []
    for prompt in prompts:
        driver.clear()
        alone += driver.generate([prompt], 30, options=options)
    assert len({tuple(text) for text in alone}) == 5
    for chunk in (None, 7):
        driver.clear()
        assert driver.generate(prompts, 30, options=options, chunk=chunk) == alone
    driver.clear()
    halves = [prompt + text[:13] for prompt, text in zip(prompts, alone, strict=True)]
    assert driver.generate(halves, 17, options=options) == [text[13:] for text in alone]


@pytest.mark.parametrize("isa", ISAS)
def test_texts_are_the_same_on_any_number_of_threads(grouped_dir: Path, isa: str) -> None:
    """Also if logits are kept instead of finding only the largest."""
    prompts = [random_ids(num, num) for num in (40, 3, 17)]
    texts = []
    for threads, keep_logits in [(1, True), (1, False), (2, False), (3, False)]:
        driver = Native(grouped_dir, isa, keep_logits, threads=threads)
        texts.append([driver.generate(prompts, 25), driver.generate(prompts, 25, options=DRAWN)])
        driver.runner.close()
    assert all(text == texts[0] for text in texts)
