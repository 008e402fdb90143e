"""Vision towers make transformers' rows of embeddings, alone and in batches with the same bits."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu.isa import available
from pipeline.media.config import LlavaOnevision, load
from pipeline.media.processors.llava_onevision import best_resolution
from pipeline.stages.execute.cpu.vision import MediaItem, VisionEncoder
from tests.stages.execute.driver import settings
from tests.stages.execute.vision.tiny_towers import (
    ONEVISION,
    VARIANTS,
    Variant,
    encode,
    encoder,
    images,
    make,
    normalized,
    prepared,
    save,
)

MAX_ERROR = 1e-4
MIN_COSINE = 0.9995
"""Of rows in bfloat16."""


class Tower:
    """A tiny random model, in transformers and prepared."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        self.variant = variant
        self.model = make(self.variant)
        self.folder = prepared(folder, save(folder, self.variant, self.model))

    def theirs(self, pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            rows = self.variant.theirs(self.model, normalized(pixels))
        return rows.reshape(-1, rows.shape[-1]).numpy()

    def items(self) -> list[np.ndarray]:
        """Images of one tile and of several, of each size."""
        return [images(num, *size, seed=num) for size in self.variant.sizes for num in (1, 3)]


@pytest.fixture(scope="module", params=VARIANTS)
def tower(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return Tower(tmp_path_factory.mktemp("tower"), VARIANTS[request.param])


@pytest.fixture(params=["torch", *available()])
def computed(request: Any, tower: Tower) -> Iterator[VisionEncoder]:
    dtype = "float32" if request.param == "torch" else "bfloat16"
    with closing(encoder(tower.folder, settings(kernels=request.param, dtype=dtype))) as found:
        yield found


def test_rows_are_those_of_transformers(tower: Tower, computed: VisionEncoder) -> None:
    for pixels in tower.items():
        (ours,), theirs = encode(computed, pixels), tower.theirs(pixels)
        assert ours.shape == theirs.shape
        if computed.program.name.startswith("torch"):
            assert np.abs(ours - theirs).max() < MAX_ERROR
        else:
            cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
            assert cosines.min() > MIN_COSINE
        assert len(theirs) == 1 or theirs.std(axis=0).min() > 1e-3, "rows must differ"


def test_rows_have_the_same_bits_in_a_batch(tower: Tower, computed: VisionEncoder) -> None:
    items = tower.items()
    alone = [np.concatenate([encode(computed, tile[None])[0] for tile in item]) for item in items]
    together = encode(computed, *items)
    backwards = encode(computed, *items[::-1])[::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert np.array_equal(one, two) and np.array_equal(one, three)


def test_what_a_tower_cannot_take_is_named(tower: Tower, computed: VisionEncoder) -> None:
    with pytest.raises(ValueError, match="an image of 50 x 48 pixels"):
        computed.num_tile_rows(MediaItem(images(1, 50, 48)))
    with pytest.raises(ValueError, match="float64 with 3 channels"):
        computed.num_tile_rows(MediaItem(images(1, 48, 48).astype(np.float64)))
    item = MediaItem(images(1, 48, 48))
    with pytest.raises(ValueError, match=r"rows are float32 \[1, 64\]"):
        computed.encode([item], [np.zeros((1, 64), np.float32)])


SIZES = [(48, 48), (30, 90), (100, 40), (300, 290), (37, 200), (500, 20)]
"""Heights and widths of images before they are cut into tiles. Some have more rows than two tiles."""


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return Tower(tmp_path_factory.mktemp("tower"), ONEVISION)


@pytest.mark.parametrize("kernels", ["torch", available()[0]])
def test_the_rows_of_tiles_are_packed_as_transformers_does(onevision: Tower, kernels: str) -> None:
    dtype = "float32" if kernels == "torch" else "bfloat16"
    media = load(onevision.folder)
    assert isinstance(media, LlavaOnevision)
    with closing(encoder(onevision.folder, settings(kernels=kernels, dtype=dtype))) as computed:
        for size in SIZES:
            resolution = best_resolution(size, media.resolutions)
            lines, columns = resolution[0] // 48, resolution[1] // 48
            item = MediaItem(images(1 + lines * columns, 48, 48), (lines, columns, *size))
            with torch.inference_mode():
                found = onevision.model.get_image_features(
                    normalized(item.pixels)[None], torch.tensor([size]), vision_aspect_ratio="anyres_max_2"
                )
            theirs = found.pooler_output[0].numpy()
            ours = np.full_like(theirs, np.nan)
            computed.encode([item], [ours])
            assert np.abs(ours - theirs).max() < (MAX_ERROR if kernels == "torch" else 0.1)
            with pytest.raises(ValueError, match=rf"this image has \[{len(theirs)}, 64\]"):
                computed.encode([item], [ours[1:]])
