"""M-RoPE: the positions of images are frames, lines and columns, and what follows counts on from them. Logits are those
of transformers, and the same bits in chunks, behind a prefix, in a batch, and after a preemption."""

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.kernels.cpu.isa import available
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.stages.execute.vision.coordinates import RowCoordinates
from tests.stages.execute.driver import GREEDY, Driver, i32, row_add, take
from tests.stages.execute.vision.test_encodes import driver_of
from tests.stages.execute.vision.test_patch_towers import Tower
from tests.stages.execute.vision.tiny_towers import QWEN, normalized

SIZES = [(48, 80), (80, 32)]
"""Heights and widths of the images of a prompt."""
FIRST, BETWEEN, BEHIND = 3, 5, 9
"""Tokens of text before, between and behind them."""
NUM_DECODED = 3
"""Ids behind the prompt, which decode alone."""


class Prompt:
    """A prompt with two images and some ids behind it, in transformers and in pieces of it."""

    def __init__(self, tower: Tower, seed: int = 3) -> None:
        self.items = [tower.item(size) for size in SIZES]
        self.nums = [len(item.pixels) // 4 for item in self.items]
        random, row_id = np.random.default_rng(seed), tower.config.row_id
        texts = [random.integers(3, 200, num).tolist() for num in (FIRST, BETWEEN, BEHIND + NUM_DECODED)]
        self.ids = [*texts[0], *[row_id] * self.nums[0], *texts[1], *[row_id] * self.nums[1], *texts[2]]
        firsts = FIRST, FIRST + self.nums[0] + BETWEEN
        self.runs = list(zip(firsts, self.nums, strict=True))
        self.grids = [[first, *item.grid] for first, item in zip(firsts, self.items, strict=True)]
        self.num_prompt = len(self.ids) - NUM_DECODED

    def theirs(self, model: Any, row_id: int) -> np.ndarray:
        """Logits of all positions, [ids, vocab_size]."""
        pixels = normalized(np.concatenate([item.pixels for item in self.items]))
        ids = torch.tensor([self.ids])
        with torch.inference_mode():
            found = model(
                input_ids=ids,
                pixel_values=pixels[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(pixels), -1),
                image_grid_thw=torch.tensor([item.grid for item in self.items]),
                mm_token_type_ids=(ids == row_id).long(),
            )
        return found.logits[0].numpy()

    def spans(self, row: int, start: int, end: int) -> list[tuple[int, int, int, list[int]]]:
        """What a step reads of the encoder cache: row, first position, number, slots."""
        found, before = [], 0
        for first, num in self.runs:
            low, high = max(first, start), min(first + num, end)
            if low < high:
                found.append((row, low, high - low, list(range(before + low - first, before + high - first))))
            before += num
        return found

    def jobs(self) -> list[m.EncodeJob]:
        ends = np.cumsum([0, *self.nums]).tolist()
        return [
            m.EncodeJob(bytes([i] * 16), i32(range(*ends[i : i + 2])), list(one.grid), one.pixels.tobytes(), 0,
                        list(one.pixels.shape))
            for i, one in enumerate(self.items)
        ]  # fmt: skip


class Qwen:
    def __init__(self, folder: Path, name: str) -> None:
        self.tower = tower = Tower(folder, QWEN[name])
        self.folder, self.row_id = tower.folder, tower.config.row_id
        tower.model.config.image_token_id = tower.model.model.image_token_id = self.row_id
        self.prompt = Prompt(tower)
        self.logits = self.prompt.theirs(tower.model, self.row_id)


@pytest.fixture(scope="module", params=QWEN)
def qwen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Qwen:
    return Qwen(tmp_path_factory.mktemp("qwen"), request.param)


@pytest.fixture(params=["torch", *available()])
def driver(request: Any, qwen: Qwen) -> Iterator[Driver]:
    dtype = "float32" if request.param == "torch" else "bfloat16"
    with closing(driver_of(qwen, request.param, dtype, num_bytes=3 * 64 * 4 * 64)) as found:  # type: ignore[arg-type]
        yield found


def step_with(step: m.Step, spans: list[tuple[int, int, int, list[int]]], jobs: list[m.EncodeJob]) -> m.Step:
    return msgspec.structs.replace(
        step,
        encodes=jobs,
        span_rows=i32(row for row, *_ in spans),
        span_starts=i32(start for _, start, *_ in spans),
        span_counts=i32(num for _, _, num, _ in spans),
        span_slots=i32(slot for *_, slots in spans for slot in slots),
    )


def compute(
    driver: Driver, prompt: Prompt, ends: list[int], *, encode: bool = True, shared: int = 0, snapshot: int = -1
) -> list[Any]:
    """The logits behind each of some ends of chunks from the end of the prompt on. The first `shared` blocks are those
    of the first row, and the state behind them is in the slot `snapshot`."""
    row, found = driver.take_row(), []
    blocks = [*range(shared), *driver.take_blocks(len(prompt.ids) + 1 - shared * BLOCK_SIZE)]
    jobs = prompt.jobs() if encode else []
    for start, end in pairwise([shared * BLOCK_SIZE, *ends]):
        adds = []
        if start == shared * BLOCK_SIZE or end > prompt.num_prompt:  # ids that it knows: it is added again for each
            adds = [row_add(row, prompt.ids[: max(end, prompt.num_prompt)], blocks, GREEDY, grids=prompt.grids)]
        drops = [row] if adds and found else []
        step = driver.make_step([(row, start, end - start, end >= prompt.num_prompt)], adds=adds, drops=drops)
        if step.state_reads and shared and start == shared * BLOCK_SIZE:
            step = msgspec.structs.replace(step, state_reads=i32([snapshot]))
        driver.runner.step(step_with(step, prompt.spans(row, start, end), jobs), take)
        jobs = []
        if end >= prompt.num_prompt:
            found.append(driver.logits()[0].copy())
    return found


def ends_of(prompt: Prompt, chunk: int, first: int = 0) -> list[int]:
    """Chunks up to the end of the prompt, then single positions."""
    last = prompt.num_prompt
    return [*range(first + chunk, last, chunk), last, *range(last + 1, len(prompt.ids) + 1)]


def test_logits_are_those_of_transformers(driver: Driver, qwen: Qwen) -> None:
    prompt = qwen.prompt
    ours = compute(driver, prompt, ends_of(prompt, len(prompt.ids)))
    theirs = qwen.logits[prompt.num_prompt - 1 :]
    assert len(ours) == len(theirs) == NUM_DECODED + 1
    for one, other in zip(ours, theirs, strict=True):
        if driver.runner.kernels == "torch":
            assert np.abs(one - other).max() < 1e-4 * max(1, np.abs(other).max())
        else:
            assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.999


def test_chunks_and_prefixes_change_no_bit(driver: Driver, qwen: Qwen) -> None:
    prompt = qwen.prompt
    whole = compute(driver, prompt, ends_of(prompt, len(prompt.ids)))
    begin = BLOCK_SIZE
    assert FIRST < begin < FIRST + prompt.nums[0], "the prefix ends within an image"
    snapshot = 1
    assert not compute(driver, prompt, [begin], encode=False), "that row is for its state"
    for ends, shared in ((ends_of(prompt, 7), 0), (ends_of(prompt, 1), 0), (ends_of(prompt, 11, begin), 1)):
        again = compute(driver, prompt, ends, encode=False, shared=shared, snapshot=snapshot)
        assert all(map(np.array_equal, again, whole))


def text_logits(driver: Driver, text: list[int]) -> np.ndarray:
    row, blocks = driver.take_row(), driver.take_blocks(len(text) + 1)
    driver.runner.step(driver.make_step([(row, 0, len(text), True)], adds=[row_add(row, text, blocks, GREEDY)]), take)
    return driver.logits()[0].copy()


TEXT_IDS = np.random.default_rng(5).integers(3, 200, 40).tolist()


def test_rows_beside_it_change_no_bit(driver: Driver, qwen: Qwen) -> None:
    """A text, the prompt and a part of it in one step; then in each other's rows."""
    prompt = qwen.prompt
    (whole,) = compute(driver, prompt, [prompt.num_prompt])
    driver.clear()
    text = text_logits(driver, TEXT_IDS)
    driver.clear()
    rows = [driver.take_row() for _ in range(3)]
    for row_of in (rows, rows[::-1]):
        entries, adds, spans = [], [], []
        parts = (TEXT_IDS, []), (prompt.ids[: prompt.num_prompt], prompt.grids), (prompt.ids[:20], prompt.grids)
        for row, (ids, grids) in zip(row_of, parts, strict=True):
            entries.append((row, 0, len(ids), True))
            blocks = driver.take_blocks(len(ids) + 1)
            adds.append(row_add(row, ids, blocks, GREEDY, grids=grids))
            spans += prompt.spans(row, 0, len(ids)) if grids else []
        driver.runner.step(step_with(driver.make_step(entries, adds=adds), spans, prompt.jobs()), take)
        found = driver.logits()
        assert np.array_equal(found[0], text) and np.array_equal(found[1], whole)
        driver.step(drops=rows)


def test_coordinates_are_those_of_transformers(qwen: Qwen) -> None:
    random, model = np.random.default_rng(1), qwen.tower.model.model
    for _ in range(50):
        ids, grids = [], []
        for _ in range(int(random.integers(0, 4))):
            ids += [5] * int(random.integers(1, 9))
            lines, columns = (int(random.integers(1, 7)) for _ in range(2))
            grids.append([len(ids), 1, 2 * lines, 2 * columns])
            ids += [qwen.row_id] * (lines * columns)
        ids += [5] * int(random.integers(1, 9))
        found, types = torch.tensor([ids]), torch.tensor([ids]) == qwen.row_id
        theirs, delta = model.get_rope_index(
            found, types.long(), torch.tensor([grid[1:] for grid in grids]) if grids else None
        )
        rows = RowCoordinates(4, merge=2)
        rows.add(2, grids)
        entry = np.full(len(ids) + 3, 2, np.int32)
        ours = rows.of(entry, np.arange(len(ids) + 3))
        expected = np.arange(len(ids) + 3) + int(delta[0, 0])
        if not grids:
            assert ours is None
            continue
        assert ours is not None and np.array_equal(ours[:, : len(ids)], theirs[:, 0].numpy())
        assert np.array_equal(ours[:, len(ids) :], np.tile(expected[len(ids) :], (3, 1)))


def test_texts_turn_by_positions(qwen: Qwen) -> None:
    """With images and without, where nothing is computed for coordinates."""
    with (
        closing(driver_of(qwen, "torch", "float32", 0)) as plain,  # type: ignore[arg-type]
        closing(driver_of(qwen, "torch", "float32")) as turning,  # type: ignore[arg-type]
    ):
        assert plain.runner.inputs.angles is None and turning.runner.inputs.angles is not None
        ours, theirs = text_logits(turning, TEXT_IDS), text_logits(plain, TEXT_IDS)
    assert np.abs(ours - theirs).max() < 1e-4
