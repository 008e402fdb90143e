"""Vision towers of images that come as patches make transformers' rows, alone and in batches with the same bits."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.errors import UserError
from pipeline.kernels.cpu.isa import available
from pipeline.media import processors
from pipeline.media.config import MediaConfig, load
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.vision import MediaItem, VisionEncoder
from pipeline.stages.execute.models import decoder
from pipeline.stages.execute.ranks.layer_split import Part
from tests.stages.execute.driver import settings
from tests.stages.execute.vision.tiny_towers import QWEN, Variant, encoder, images, make, normalized, prepared, save

MAX_ERROR = 1e-4
MIN_COSINE = 0.9995
SIZES = [(48, 48), (16, 48), (80, 32), (48, 80), (16, 16), (200, 20)]
"""Heights and widths"""


class Tower:
    """A tiny random model, in transformers and prepared."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        self.model = make(variant)
        self.folder = prepared(folder, save(folder, variant, self.model))
        config = load(self.folder)
        assert config is not None
        self.config: MediaConfig = config

    def item(self, size: tuple[int, int]) -> MediaItem:
        image = Image.fromarray(np.ascontiguousarray(images(1, *size)[0].transpose(1, 2, 0)))
        found = processors.process(image, self.config)
        return MediaItem(found.pixels, found.grid)

    def theirs(self, item: MediaItem) -> np.ndarray:
        num, frames = len(item.pixels), 2
        patches = normalized(item.pixels)[:, :, None].expand(-1, -1, frames, -1, -1).reshape(num, -1)
        with torch.inference_mode():
            found = self.model.get_image_features(patches, torch.tensor([item.grid]))
        parts = [found.pooler_output, *getattr(found, "deepstack_features", ())]
        return torch.cat([torch.cat(list(one)) for one in parts], dim=1).numpy()


@pytest.fixture(scope="module", params=QWEN)
def tower(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return Tower(tmp_path_factory.mktemp("tower"), QWEN[request.param])


@pytest.fixture(params=["torch", *available()])
def computed(request: Any, tower: Tower) -> Iterator[VisionEncoder]:
    dtype = "float32" if request.param == "torch" else "bfloat16"
    with closing(encoder(tower.folder, settings(kernels=request.param, dtype=dtype))) as found:
        yield found


def encode(computed: VisionEncoder, *items: MediaItem) -> list[np.ndarray]:
    width = computed.config.row_width
    out = [np.full((computed.num_tile_rows(item), width), np.nan, np.float32) for item in items]
    computed.encode(items, out)
    return out


def test_rows_are_those_of_transformers(tower: Tower, computed: VisionEncoder) -> None:
    for item in map(tower.item, SIZES):
        (ours,), theirs = encode(computed, item), tower.theirs(item)
        assert ours.shape == theirs.shape
        if computed.program.name.startswith("torch"):
            assert np.abs(ours - theirs).max() < MAX_ERROR
        else:
            cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
            assert cosines.min() > MIN_COSINE
        assert len(theirs) == 1 or theirs.std(axis=0).min() > 1e-3, "rows must differ"


def test_rows_have_the_same_bits_in_a_batch(tower: Tower, computed: VisionEncoder) -> None:
    items = [tower.item(size) for size in SIZES]
    alone = [encode(computed, item)[0] for item in items]
    together = encode(computed, *items)
    backwards = encode(computed, *items[::-1])[::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert np.array_equal(one, two) and np.array_equal(one, three)


def test_a_stage_behind_the_first_adds_nothing_of_images(tmp_path: Path) -> None:
    folder = Tower(tmp_path, QWEN["qwen3_vl, deepstack"]).folder
    program = Mock(num_encoded_layers=2)
    config, weights = ModelConfig.load(folder), Mock()
    with pytest.raises(UserError, match=r"the first 2 layers of .*, but the first stage has fewer; set execute\.pipel"):
        decoder.build(config, weights, program, Part(range(1, 3), is_first=False))
    decoder.build(config, weights, program, Part(range(2, 3), is_first=False, is_last=False))
    assert not program.add_encoded.called and program.attention.called


def test_what_a_tower_cannot_take_is_named(tower: Tower, computed: VisionEncoder) -> None:
    item = tower.item((48, 48))
    for grid in ((1, 6, 5), (2, 6, 3), (1, 36, 1), (6, 6)):
        with pytest.raises(ValueError, match="an image of 36 patches, as"):
            computed.num_tile_rows(MediaItem(item.pixels, grid))
    with pytest.raises(ValueError, match="float64 with 3 channels"):
        computed.num_tile_rows(MediaItem(item.pixels.astype(np.float64), item.grid))
