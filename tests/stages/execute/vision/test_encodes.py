"""Steps with images: their rows go into the encoder cache, and positions read them in place of embeddings."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.errors import UserError
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.encodes import MediaFacts, load_encodes
from pipeline.stages.execute.ranks.context import RankContext
from tests.stages.execute.driver import GREEDY, Driver, i32, make_step, row_add, settings, take
from tests.stages.execute.vision.tiny_towers import VARIANTS, Variant, images, make, normalized, prepared, save

VARIANT = VARIANTS["idefics3"]
ROWS = 9
"""Of a tile: squares of 2 patches, of a side of 6."""
HIDDEN_BYTES = 4 * 64
NUM_ROWS = 32
PIXELS = images(2, 48, 48)
RUNS = [(3, ROWS), (14, ROWS)]
NUM_IDS = 30


class Model:
    """A tiny model in transformers, and its prepared folder."""

    def __init__(self, folder: Path, variant: Variant = VARIANT) -> None:
        self.model, self.kind = make(variant), variant.kind
        source = save(folder, variant, self.model)
        self.folder = prepared(folder, source)
        self.image_id = msgspec.json.decode((source / "config.json").read_bytes())["image_token_id"]
        self.model.config.image_token_id = self.model.model.image_token_id = self.image_id
        self.ids = np.random.default_rng(3).integers(3, 200, NUM_IDS).tolist()
        for start, num in RUNS:
            self.ids[start : start + num] = [self.image_id] * num

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """Of all positions, [ids, vocab_size]."""
        ids, values = torch.tensor([self.ids]), normalized(pixels)
        inputs: dict[str, Any] = {"pixel_values": values[None]}
        if self.kind == "gemma3":
            inputs = {"pixel_values": values, "token_type_ids": (ids == self.image_id).long()}
        with torch.inference_mode():
            found = self.model(input_ids=ids, **inputs)
        return found.logits[0].numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The positions of an image see each other."""
    return Model(tmp_path_factory.mktemp("gemma"), VARIANTS["gemma3"])


@pytest.fixture(params=["torch", *available()])
def driver(request: Any, model: Model) -> Iterator[Driver]:
    dtype = "float32" if request.param == "torch" else "bfloat16"
    with closing(driver_of(model, request.param, dtype)) as found:
        yield found


@pytest.fixture(params=["torch", *available()])
def gemma_driver(request: Any, gemma: Model) -> Iterator[Driver]:
    dtype = "float32" if request.param == "torch" else "bfloat16"
    with closing(driver_of(gemma, request.param, dtype)) as found:
        yield found


class ClosingDriver(Driver):
    def close(self) -> None:
        self.runner.close()


def driver_of(model: Model, kernels: str, dtype: str, num_bytes: int = NUM_ROWS * HIDDEN_BYTES) -> ClosingDriver:
    config = settings(kernels=kernels, dtype=dtype)
    execute = msgspec.structs.replace(config.execute, encoder_cache_bytes=num_bytes)
    return ClosingDriver(model.folder, msgspec.structs.replace(config, execute=execute))


def spans_of(row: int, start: int, count: int, slots: np.ndarray) -> dict[str, Any]:
    """The fields of a step that computes these positions."""
    found: list[tuple[int, int, list[int]]] = []
    first = 0
    for begin, num in RUNS:
        low, high = max(begin, start), min(begin + num, start + count)
        if low < high:
            found.append((low, high - low, slots[first + low - begin : first + high - begin].tolist()))
        first += num
    return {
        "span_rows": i32([row] * len(found)),
        "span_starts": i32(low for low, _, _ in found),
        "span_counts": i32(num for _, num, _ in found),
        "span_slots": i32(slot for _, _, part in found for slot in part),
    }


def compute(
    driver: Driver, model: Model, slots: np.ndarray, chunk: int = NUM_IDS, pixels: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """The logits behind the prompt, computed in chunks, and the seconds of encodes. Without pixels, nothing is
    encoded."""
    return compute_chunks(driver, model, slots, [*range(0, NUM_IDS, chunk)], pixels)


def compute_chunks(
    driver: Driver,
    model: Model,
    slots: np.ndarray,
    begins: Sequence[int],
    pixels: np.ndarray | None = None,
    shared: Sequence[int] = (),
) -> tuple[np.ndarray, float]:
    """The same for chunks that begin there; `shared` blocks have what is before the first one."""
    row, encode_s = driver.take_row(), 0.0
    blocks = [*shared, *driver.take_blocks(NUM_IDS + 1 - len(shared) * BLOCK_SIZE)]
    for start, end in pairwise([*begins, NUM_IDS]):
        count = end - start
        step = make_step(
            [(row, start, count, end == NUM_IDS)],
            adds=[row_add(row, model.ids, blocks, GREEDY)] if start == begins[0] else [],
        )
        fields = spans_of(row, start, count, slots)
        if pixels is not None and fields["span_rows"]:
            job = m.EncodeJob(bytes(16), i32(slots), [0, 0], pixels.tobytes(), shape=list(pixels.shape))
            fields, pixels = {**fields, "encodes": [job]}, None
        encode_s += driver.runner.step(msgspec.structs.replace(step, **fields), take).encode_s
    return driver.logits()[0], encode_s


def test_logits_are_those_of_transformers(driver: Driver, model: Model) -> None:
    theirs = model.logits(PIXELS)[-1]
    ours, encode_s = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    assert encode_s > 0
    if driver.runner.kernels == "torch":
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    else:
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.999
    other, _ = compute(driver, model, np.arange(2 * ROWS), pixels=images(2, 48, 48, seed=7))
    assert np.abs(other - ours).max() > 0.1, "the image counts"


def test_chunks_scattered_rows_and_rows_of_earlier_steps_change_no_bit(driver: Driver, model: Model) -> None:
    whole, _ = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    slots = np.random.default_rng(1).permutation(NUM_ROWS)[: 2 * ROWS].astype(np.int32)
    for chunk in (1, 5, 16):
        again, encode_s = compute(driver, model, slots, chunk, PIXELS)
        assert np.array_equal(again, whole) and encode_s > 0
        driver.clear()
    cached, encode_s = compute(driver, model, slots, 16)
    assert np.array_equal(cached, whole) and encode_s == 0


def test_parts_over_several_steps_change_no_bit(driver: Driver, model: Model) -> None:
    whole, _ = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    slots = np.arange(2 * ROWS) + 3
    job = m.EncodeJob(bytes(16), i32(slots), [0, 0], PIXELS.tobytes(), shape=list(PIXELS.shape))
    for ends in ([1, 2, 40000, 40001], list(range(0, m.NUM_PARTS, 1000)), [m.NUM_PARTS - 1]):
        driver.clear()
        seconds = []
        for first, end in pairwise([0, *ends[ends[0] == 0 :], m.NUM_PARTS]):
            part = msgspec.structs.replace(job, first_part=first, end_part=end, pixels=b"" if first else job.pixels)
            step = msgspec.structs.replace(make_step(), encodes=[part])
            seconds.append(driver.runner.step(step, take).encode_s)
        again, encode_s = compute(driver, model, slots)
        assert np.array_equal(again, whole) and encode_s == 0 and min(seconds) > 0


def test_an_item_that_was_begun_is_dropped_for_another(driver: Driver, model: Model) -> None:
    whole, _ = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    driver.clear()
    shape = [1, *PIXELS.shape[1:]]
    other = m.EncodeJob(bytes([1] * 16), i32(range(ROWS)), [0, 0], PIXELS[:1].tobytes(), 0, shape, 0, 30000)
    driver.runner.step(msgspec.structs.replace(make_step(), encodes=[other]), take)
    again, _ = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    assert np.array_equal(again, whole)


def test_positions_of_gemma_s_images_see_each_other(gemma_driver: Driver, gemma: Model) -> None:
    facts, (first, second) = gemma_driver.runner.facts, RUNS
    assert (facts.num_encoder_rows, facts.max_whole_run) == (NUM_ROWS, ROWS)
    theirs, slots = gemma.logits(PIXELS)[-1], np.arange(2 * ROWS)
    ours, _ = compute(gemma_driver, gemma, slots, pixels=PIXELS)
    if gemma_driver.runner.kernels == "torch":
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    else:
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.999
    for begins in ([0, 1, *(sum(first), second[0]), sum(second)], [0, second[0], sum(second) + 1], [0, first[0]]):
        again, _ = compute_chunks(gemma_driver, gemma, slots, begins)
        assert np.array_equal(again, ours)
    # The first block, which the first row has computed, ends within the second image.
    assert second[0] < BLOCK_SIZE < sum(second)
    again, _ = compute_chunks(gemma_driver, gemma, slots, [BLOCK_SIZE], shared=[0])
    assert np.array_equal(again, ours)
    cut, _ = compute_chunks(gemma_driver, gemma, slots, [0, first[0] + 1])
    assert np.abs(cut - ours).max() > 1e-4, "what is behind a position counts"


def test_a_row_that_has_ended_reads_nothing(driver: Driver, model: Model) -> None:
    whole, _ = compute(driver, model, np.arange(2 * ROWS), pixels=PIXELS)
    driver.clear()
    row, blocks = driver.take_row(), driver.take_blocks(NUM_IDS + 1)
    driver.step([], adds=[row_add(row, model.ids, blocks, GREEDY)])
    driver.runner.rows.end(row)
    step = make_step([(row, 0, NUM_IDS, True)])
    driver.runner.step(msgspec.structs.replace(step, **spans_of(row, 0, NUM_IDS, np.arange(2 * ROWS))), take)
    again, _ = compute(driver, model, np.arange(2 * ROWS))
    assert np.array_equal(again, whole)


def test_the_number_of_rows_is_that_of_the_setting(model: Model) -> None:
    with closing(driver_of(model, "torch", "float32", NUM_ROWS * HIDDEN_BYTES + 5)) as found:
        assert found.runner.facts.num_encoder_rows == NUM_ROWS
    with closing(driver_of(model, "torch", "float32", 0)) as found:
        assert found.runner.facts.num_encoder_rows == 0
    with pytest.raises(UserError, match="a row takes 256 bytes"):
        driver_of(model, "torch", "float32", HIDDEN_BYTES - 1)


def test_a_rank_that_does_not_encode_frees_what_a_step_brings_and_embeds_no_placeholder(model: Model) -> None:
    config = settings()
    execute = msgspec.structs.replace(config.execute, encoder_cache_bytes=NUM_ROWS * HIDDEN_BYTES)
    config = msgspec.structs.replace(config, execute=execute)
    facts = MediaFacts.of(config, model.folder)
    encodes = load_encodes(
        config, model.folder, ModelConfig.load(model.folder), None, RankContext(1, 2, -1, 1.0), facts
    )
    assert encodes is not None and encodes.rows is None and facts.num_encoder_rows == NUM_ROWS
    taken: list[Any] = []
    job = m.EncodeJob(bytes(16), i32(range(18)), [0, 0], PIXELS.tobytes(), shape=list(PIXELS.shape))
    step = msgspec.structs.replace(make_step(), encodes=[job], **spans_of(0, 0, NUM_IDS, np.arange(2 * ROWS)))
    encodes.encode(step, lambda array, dtype: (taken.append(array), take(array, dtype))[1], lambda: 0.0)
    spans = (step.span_rows, step.span_starts, step.span_counts, step.span_slots)
    assert len(taken) == 6 and all(one in taken for one in (job.slots, job.pixels, *spans))
    ids = np.arange(NUM_IDS, dtype=np.int32)
    entry = np.zeros(NUM_IDS, np.int32)
    encodes.put(ids, ids, entry, *(np.array([value], np.int32) for value in (0, 0, NUM_IDS)))
    assert np.flatnonzero(ids < 0).tolist() == [start + i for start, num in RUNS for i in range(num)]
