"""Copies of KV blocks, swapping and forks: exact in both back ends, in any order of the list."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import GREEDY, Driver, i32, make_step, row_add, settings, take
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write

DRAWN = m.GenerationOptions(temperature=1.5, seed=2**64 - 3, ignore_eos=True)
ITEM_BYTES = {"native": 2, "torch": 4, "native int8": 1, "torch int8": 1}
"""Of a number in the KV memory of each back end."""
BLOCK_BYTES = {backend: block_bytes(3, 2, 16, item_bytes) for backend, item_bytes in ITEM_BYTES.items()}
NUM_SWAP_BLOCKS = 9

SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "in several parts": {"num_layers": 2, "num_kv_heads": 3, "num_heads": 3, "head_dim": 96},
    "one layer": {"num_layers": 1},
}


def make(backend: str, folder: Path, swap_bytes: int, **how: Any) -> Driver:
    kernels, _, kv_dtype = backend.partition(" ")
    how["kv_dtype"] = kv_dtype or "auto"
    if kernels == "native":
        return Native(folder, ISAS[0], swap_bytes=swap_bytes, threads=3, **how)
    return Driver(folder, settings(kernels="torch", **how), swap_bytes)


@pytest.fixture(params=ITEM_BYTES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


@pytest.fixture
def driver(backend: str, tiny: Path) -> Iterator[Driver]:
    """With the number of swap blocks above, and memory for almost one more."""
    swap_bytes = (NUM_SWAP_BLOCKS + 1) * BLOCK_BYTES[backend] - 1
    driver = make(backend, tiny, swap_bytes, kv_mib=1)
    assert driver.runner.facts.num_swap_blocks == NUM_SWAP_BLOCKS
    yield driver
    driver.runner.close()


# --- contents of blocks


class Memory:
    """All blocks of a runner, then those of its swap space, as bytes [blocks, layers, …]."""

    def __init__(self, runner: CpuRunner) -> None:
        program = runner.program
        if isinstance(program, NativeProgram):
            shape = runner.facts.num_blocks, program._blocks.layer_bytes
            at = [ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)) for address in program._attention._units]
            self._layers = [np.ctypeslib.as_array(one, shape) for one in at]
            swap = program._swap
        else:
            assert isinstance(program, TorchProgram)
            memory = program._memory.view(dtype=torch.uint8).numpy()
            self._layers = [layer.swapaxes(0, 1) for layer in memory]
            assert program._swapped is not None
            swap = program._swapped.view(dtype=torch.uint8).numpy()
        assert swap is not None
        self._swap = swap.reshape(len(swap), -1)
        self.num_blocks = runner.facts.num_blocks

    def read(self) -> np.ndarray:
        """[blocks, bytes of a block]"""
        kv = np.stack([layer.reshape(self.num_blocks, -1) for layer in self._layers], axis=1)
        return np.concatenate([kv.reshape(self.num_blocks, -1), self._swap])

    def write(self, blocks: np.ndarray) -> None:
        kv = blocks[: self.num_blocks].reshape(self.num_blocks, len(self._layers), -1)
        for number, layer in enumerate(self._layers):
            layer[:] = kv[:, number].reshape(layer.shape)
        self._swap[:] = blocks[self.num_blocks :]


def copied(blocks: np.ndarray, copies: list[tuple[int, int]]) -> np.ndarray:
    """The expected contents afterwards."""
    blocks = blocks.copy()
    for source, target in copies:
        blocks[target] = blocks[source]
    return blocks


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_copies_happen_in_order_even_if_they_overlap(backend: str, shape: dict[str, Any], tmp_path: Path) -> None:
    config = checkpoints.config_of(**shape)
    write(tmp_path, config)
    num_bytes = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, ITEM_BYTES[backend])
    driver = make(backend, tmp_path, NUM_SWAP_BLOCKS * num_bytes, kv_mib=1)
    memory = Memory(driver.runner)
    num = memory.num_blocks + NUM_SWAP_BLOCKS
    random = np.random.default_rng(len(shape))
    few = [0, 1, memory.num_blocks - 1, memory.num_blocks, memory.num_blocks + 1, num - 1]
    chain = [(few[i], few[i + 1]) for i in range(5)]
    lists = [chain, chain[::-1], [(few[0], few[3]), (few[1], few[0]), (few[3], few[1])], [(few[5], few[3])]]
    for length in (1, 2, 5, 13, 40, 40, 40, 200):
        lists += [
            [tuple(random.choice(pool, 2, replace=False).tolist()) for _ in range(length)]
            for pool in (few, list(range(num)))
        ]
    before = random.integers(0, 256, memory.read().shape, np.uint8)
    memory.write(before)
    assert (memory.read() == before).all()
    for copies in lists:
        before = copied(before, copies)
        driver.step(copies=copies)
        np.testing.assert_array_equal(memory.read(), before)
    driver.runner.close()


def test_a_step_with_only_copies_has_an_empty_result_and_is_timed(driver: Driver) -> None:
    times = iter([3.0, 4.5])
    result = driver.runner.step(make_step(copies=[(0, 1), (1, 2)]), take, lambda: next(times))
    assert (len(result.rows), result.num_rows, result.num_copies, result.copy_s) == (0, 0, 2, 1.5)

    def no_clock() -> float:
        raise AssertionError("a step without copies looked at the clock")

    assert driver.runner.step(make_step(), take, no_clock).copy_s == 0.0


def test_invalid_copies_raise_an_error_and_change_nothing(driver: Driver) -> None:
    memory = Memory(driver.runner)
    before = memory.read()
    before[:] = np.random.default_rng(0).integers(0, 256, before.shape, np.uint8)
    memory.write(before)
    end = len(before)
    for copies in ([(0, end)], [(end, 0)], [(1, 2), (-1, 0)], [(0, -1)], [(0, 1), (3, 3)]):
        with pytest.raises(AssertionError, match="copied"):
            driver.step(copies=copies)
    odd = msgspec.structs.replace(make_step(), copy_sources=i32([0, 1]), copy_targets=i32([2]))
    with pytest.raises(AssertionError, match="2 source blocks, 1 target blocks"):
        driver.runner.step(odd, take)
    np.testing.assert_array_equal(memory.read(), before)
    with pytest.raises(AssertionError, match="outside the KV memory"):
        driver.step(adds=[row_add(0, [5], [driver.runner.facts.num_blocks])])


def test_blocks_can_be_copied_without_swap_space(backend: str, tiny: Path) -> None:
    driver = make(backend, tiny, 0, kv_mib=1)
    facts = driver.runner.facts
    assert facts.num_swap_blocks == 0
    driver.step(copies=[(0, facts.num_blocks - 1)])
    with pytest.raises(AssertionError, match="copied"):
        driver.step(copies=[(0, facts.num_blocks)])
    driver.runner.close()


def test_the_error_for_too_little_swap_space_names_the_key(backend: str, tiny: Path) -> None:
    num_bytes = BLOCK_BYTES[backend]
    with pytest.raises(
        UserError, match=rf"swap_bytes is {size_words(num_bytes - 1)}, .* takes {size_words(num_bytes, up=True)}: raise"
    ):
        make(backend, tiny, num_bytes - 1, kv_mib=1)
    driver = make(backend, tiny, num_bytes, kv_mib=1)
    assert driver.runner.facts.num_swap_blocks == 1
    driver.runner.close()


# --- texts continue


def decode(driver: Driver, row: int, position: int, num: int) -> tuple[list[int], list[np.ndarray]]:
    """Ids and logits of `num` steps of one row alone, starting from its id at `position`."""
    ids, logits = [], []
    for at in range(position, position + num):
        ids.append(int(driver.step([(row, at, 1, True)]).ids[0]))
        logits.append(driver.logits()[0])
    return ids, logits


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_swapped_row_continues_as_if_it_had_never_been_swapped_out(
    driver: Driver, options: m.GenerationOptions
) -> None:
    """Another row overwrites its old blocks in the step that copies them, and the row is resumed in other blocks."""
    prompt = random_ids(37, 1)
    driver.step([(0, 0, 37, True)], adds=[row_add(0, prompt, [4, 7, 2, 9], options)])
    expected, expected_logits = decode(driver, 0, 37, 25)
    first = int(driver.runner.rows.ids[0, 37])
    driver.clear()

    slots = [driver.runner.facts.num_blocks + slot for slot in (8, 0, 5)]
    driver.step([(0, 0, 37, True)], adds=[row_add(0, prompt, [4, 7, 2], options)])
    made, logits = decode(driver, 0, 37, 6)
    known = [*prompt, first, *made]
    intruder = random_ids(60, 2)
    driver.step(
        [(0, 0, 60, True)],
        drops=[0],
        adds=[row_add(0, intruder, [2, 4, 7, 9], generation=2)],
        copies=list(zip([4, 7, 2], slots, strict=True)),
    )
    for position in range(60, 64):
        driver.step([(0, position, 1, True)])
    blocks = [7, 11, 2]  # two of its own old blocks, in other places, and a new one
    back = driver.step(
        [(3, 43, 1, True)],
        drops=[0],
        adds=[row_add(3, known, blocks, options, num_prompt=37, generation=3)],
        copies=list(zip(slots, blocks, strict=True)),
    )
    made.append(int(back.ids[0]))
    logits.append(driver.logits()[0])
    driver.step(blocks=[(3, 0)])
    rest, rest_logits = decode(driver, 3, 44, 18)
    assert made + rest == expected
    np.testing.assert_array_equal([*logits, *rest_logits], expected_logits)


def test_two_rows_swap_places_through_one_slot(driver: Driver) -> None:
    """Blocks of both are copied and overwritten within one list: a to a slot, b to a's place, a to b's place."""
    prompts = [random_ids(16 + 9, seed) for seed in (3, 4)]
    tables = [[0, 1, 2], [3, 4, 5]]
    adds = [row_add(row, prompts[row], tables[row]) for row in (0, 1)]
    driver.step([(row, 0, 25, True) for row in (0, 1)], adds=adds)
    expected = [decode(driver, row, 25, 12)[0] for row in (0, 1)]
    firsts = [int(driver.runner.rows.ids[row, 25]) for row in (0, 1)]
    driver.clear()
    driver.step([(row, 0, 25, True) for row in (0, 1)], adds=adds)
    slot = driver.runner.facts.num_blocks
    driver.step(
        drops=[0, 1],
        adds=[row_add(row, [*prompts[row], firsts[row]], tables[1 - row], generation=2) for row in (0, 1)],
        copies=[(0, slot), (3, 0), (slot, 3), (1, slot), (4, 1), (slot, 4)],
    )
    assert [decode(driver, row, 25, 12)[0] for row in (0, 1)] == expected


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_forks_continue_from_the_prompts_blocks_and_a_copy_of_the_last(
    driver: Driver, options: m.GenerationOptions
) -> None:
    """The last block of the prompt is half full: each fork has a copy of it, and appends to its copy."""
    prompt = random_ids(39, 5)
    alone = []
    for index in range(3):
        driver.clear()
        driver.step([(0, 0, 39, True)], adds=[row_add(0, prompt, [0, 1, 2, 3], options, index=index)])
        ids, logits = decode(driver, 0, 39, 20)
        alone.append(([int(driver.runner.rows.ids[0, 39]), *ids], logits))
    assert options == GREEDY or len({tuple(ids) for ids, _ in alone}) == 3
    driver.clear()
    driver.step([(0, 0, 39, True)], adds=[row_add(0, prompt, [0, 1, 2, 3], options, index=0)])
    driver.step([(0, 39, 1, True)])  # the parent has already appended to the block that is copied
    outputs = alone[2][0][:1]  # this fork already has an id, like a preempted sequence
    adds = [
        row_add(5, [], [0, 1, 8, 9], options, index=1, fork_of=0, num_prompt=39),
        row_add(3, outputs, [0, 1, 6, 7], options, index=2, fork_of=5, num_prompt=39),
    ]
    step = [(0, 40, 1, True), (5, 38, 1, True), (3, 38, 2, True)]
    result = driver.step(step, adds=adds, copies=[(2, 8), (2, 6)])
    assert result.ids.tolist() == [alone[0][0][2], alone[1][0][0], alone[2][0][1]]
    for row, position, (ids, logits), done in [(0, 41, alone[0], 3), (5, 39, alone[1], 1), (3, 40, alone[2], 2)]:
        rest, rest_logits = decode(driver, row, position, 20 - done)
        assert rest == ids[done:-1]
        # With torch, keys and values depend on the number of rows of a step, because sums are rounded differently.
        # In 8 bits, a number may then get the neighbouring code.
        is_quantized = driver.runner.facts.kv_dtype == "int8"
        max_error = 0 if isinstance(driver.runner.program, NativeProgram) else 0.02 if is_quantized else 1e-4
        np.testing.assert_allclose(rest_logits, logits[done - 1 : -1], rtol=0, atol=max_error)


def test_forks_of_missing_rows_are_rejected(driver: Driver) -> None:
    driver.step([(0, 0, 20, True)], adds=[row_add(0, random_ids(20, 6), [0, 1])])
    for add, message in [
        (row_add(1, [], [2], fork_of=4, num_prompt=20), "fork of row 4, which is not taken"),
        (row_add(1, [], [2], fork_of=8, num_prompt=20), "fork of row 8, which is not taken|row 8"),
        (row_add(1, [], [2], fork_of=0, num_prompt=22), "fork of 22 ids of row 0, which has 21"),
        (row_add(1, [], [2], fork_of=0, num_prompt=0), "fork of 0 ids"),
        (row_add(0, [], [2], fork_of=0, num_prompt=20), "taken already"),
    ]:
        with pytest.raises(AssertionError, match=message):
            driver.step(adds=[add])
    with pytest.raises(AssertionError, match="not taken"):
        driver.step(drops=[0], adds=[row_add(1, [], [2], fork_of=0, num_prompt=20)])
