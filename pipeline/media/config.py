"""How a model's images are processed: `media.json` in a prepared folder. Prepare writes it, ingest's helpers follow it.

Each family of processors has a struct. Sizes are (height, width) in pixels, colors are red, green, blue. Pixels stay
uint8; a vision tower computes `(pixel * scale - mean) / std` of each.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.runtime.model.model_folder import read_file

MEDIA = "media.json"
MAX_SIDE = 16384
"""The largest side of what a processor makes."""
MAX_RATIO = 200
"""How many times as long as the other one side of an image may be for Qwen2-VL."""
MAX_PATCHES = 16384
"""Of an image of Qwen2-VL, whatever its files say."""

Size = tuple[Annotated[int, Meta(ge=1, le=MAX_SIDE)], Annotated[int, Meta(ge=1, le=MAX_SIDE)]]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Color = tuple[float, float, float]
Token = Annotated[str, Meta(min_length=1, max_length=256)]


class _Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="family"):
    resample: Annotated[int, Meta(ge=0, le=5)]
    """The filter, as Pillow numbers them: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    scale: float
    mean: Color
    std: Color
    placeholder: Token
    """The token that stands for one image in a rendered chat."""
    row_token: Token
    """The token that stands for one row of embeddings in the prompt; in some families also the placeholder."""
    row_id: Annotated[int, Meta(ge=0)]


class Idefics3(_Family, frozen=True, kw_only=True, tag="idefics3"):
    """Idefics3, SmolVLM: the image in square tiles, and all of it in one more."""

    longest_edge: Side | None
    """To which the longer side is resized before the image is split; None: as it is."""
    tile: Side
    """The side of a tile."""
    splits: bool
    tile_rows: Side
    """Rows of embeddings of each tile."""
    fake_token: Token
    """The token around each tile."""
    global_token: Token
    """The token before the tile that shows all."""


class Llava(_Family, frozen=True, kw_only=True, tag="llava"):
    """LLaVA 1.5, and other models that see one square of fixed size."""

    pads_to_square: bool
    shortest_edge: Side | None
    """To which the shorter side is resized; None: the image is resized to `size`."""
    size: Size | None
    crop: Size | None
    num_rows: Side


class LlavaOnevision(_Family, frozen=True, kw_only=True, tag="llava_onevision"):
    """LLaVA-OneVision: the whole image, and then the image in tiles of the same size, without the rows of its
    padding."""

    size: Size
    """Of a tile."""
    resolutions: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=1024)]
    """To one of which the tiles are resized together."""
    tile_side: Side
    """The square root of a tile's rows of embeddings."""
    max_tiles: Side
    """If the tiles have more rows than this many tiles, they are interpolated to fewer."""


class PanAndScan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When, and into how many crops, Gemma 3 cuts long images."""

    min_crop: Side
    max_crops: Side
    min_ratio: float


class Gemma3(_Family, frozen=True, kw_only=True, tag="gemma3"):
    """Gemma 3: the positions of an image, or of a crop, see each other."""

    size: Size
    num_rows: Side
    """Of an image, or a crop."""
    begin_token: Token
    end_token: Token
    pan_and_scan: PanAndScan | None


class Qwen2VL(_Family, frozen=True, kw_only=True, tag="qwen2_vl"):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: patches of an image of any shape."""

    min_pixels: Annotated[int, Meta(ge=1)]
    max_pixels: Annotated[int, Meta(ge=1, le=2**28)]
    patch: Side
    merge: Side
    """Patches on the side of a square whose patches make one row of embeddings."""
    temporal_patch: Side
    """Frames of a patch. All show the same image."""

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        step = self.patch * self.merge
        # A side of one step may not shrink further; images that are too small get larger by a step at most.
        long, short = (self.min_pixels * MAX_RATIO) ** 0.5, (self.min_pixels / MAX_RATIO) ** 0.5
        enlarged = self.min_pixels + step * (long + short) + step**2
        return int(max(self.max_pixels, MAX_RATIO * step**2, enlarged)) // self.patch**2


class Pixtral(_Family, frozen=True, kw_only=True, tag="pixtral"):
    """Pixtral, Mistral 3: an image of any shape; a token ends each line of its rows."""

    max_size: Size
    patch: Side
    merge: Side
    break_token: Token
    end_token: Token


MediaConfig = Idefics3 | Llava | LlavaOnevision | Gemma3 | Qwen2VL | Pixtral

_decoder = msgspec.json.Decoder(MediaConfig)


def load(folder: Path) -> MediaConfig | None:
    """The configuration in a prepared folder; None if the model has none. Raises msgspec.ValidationError if it is no
    valid one, and OSError if it can't be read."""
    path = folder / MEDIA
    return _decoder.decode(read_file(path)) if path.is_file() else None


def save(config: MediaConfig, folder: Path) -> None:
    """Write it. Raises msgspec.ValidationError if a value is out of range."""
    data = msgspec.json.format(msgspec.json.encode(config))
    _decoder.decode(data)
    (folder / MEDIA).write_bytes(data + b"\n")
