"""The vision tower of a model for texts and images: what makes rows of embeddings from pixels. In a prepared folder it
is `vision.json`, which is missing if the model has no tower that we compute.

pixels ─► patches ─► layers, as those of an encoder ─► norm ─► squares of patches as one row ─► matrices ─► rows
"""

from pathlib import Path
from typing import Literal

import msgspec

from pipeline.runtime.model.model_config import Activation, ModelConfig, NormKind
from pipeline.runtime.model.model_folder import VISION, read_file

Positions = Literal["table", "buckets", "rope"]


class Pixels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the tower reads instead of a byte of a channel: (byte * scale - mean) / std."""

    scale: float
    mean: list[float]
    """For each channel."""
    std: list[float]
    """For each channel."""


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A matrix of the projector, and what follows it."""

    num_outputs: int
    bias: bool = False
    activation: Activation | None = None


class Projector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the hidden states of patches become rows of the language model."""

    merge: int = 1
    """The side of the squares of patches whose hidden states lie side by side in a row: those of the first line from
    left to right, then those of the next one."""
    by_number: bool = False
    """Whether the first matrix has its inputs in another order: the first number of all patches of a square, then the
    second one of all."""
    mean: int = 1
    """The side of the squares of patches whose hidden states become their mean."""
    norm: NormKind | None = None
    """Of each patch, or of each mean."""
    norms_squares: bool = False
    """Whether the norm is of the numbers of all patches of a square of `merge` instead."""
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """As in `ModelConfig`."""
    matrices: list[Matrix]
    """The last one has as many outputs as the language model's hidden states."""


class Anyres(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the rows of the tiles of an image become its rows: those of the first tile, which shows all; then those of
    the others together, line by line, without their padding, and with a learned row behind each line
    (LLaVA-OneVision)."""

    max_tiles: int
    """If the rows without those behind lines are more than 1.1 ** 2 times those of this many tiles, they are
    interpolated to about that number."""


class Windows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Patches see only those in their window, except in some layers. Windows begin at the top left."""

    side: int
    """Squares of the projector on the side of a window."""
    full_layers: list[int]
    """Layers in which patches see the whole image."""


class LayerRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the hidden states behind some layers are made into. It stands behind the embeddings in each row, and the
    language model adds it to its hidden states behind its first layer, its second one, and so on (DeepStack: Meng et
    al., 2024, arXiv:2406.04334)."""

    layers: list[int] = []
    """In rising order."""
    projectors: list[Projector] = []
    """One for each."""


class VisionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a vision tower."""

    format: Literal[1] = 1
    encoder: ModelConfig
    """The layers. Its layout has the names of the tower's other tensors too: `vision.patches`, `vision.positions`,
    `vision.class`, `vision.newline`, `vision.projector.norm`, and `vision.projector.0` and so on; those of `layer_rows`
    are `vision.layer_rows.0.norm` and so on. Its weight files are those that have tensors of the tower; `max_position`
    is the number of positions in the table."""
    final_norm: bool = True
    """Whether the hidden states are normalized after the last layer."""
    image_size: int
    """Pixels of a side of the images that the table of positions is for."""
    patch_size: int
    """Pixels of a side of a patch."""
    frames: int | None = None
    """Frames of a patch, which all show the same: its matrix is [hidden_size, channels, frames, side, side]. None:
    there is no such axis."""
    max_patches: int | None = None
    """Images come as patches, up to so many: those of a square of the projector one after the other, in the order of
    their lines and columns. None: they come as pixels."""
    num_channels: int = 3
    patch_bias: bool = True
    class_token: bool = False
    """Whether the first position is that of a token which stands for the whole image. It makes no row."""
    positions: Positions = "table"
    """"table": images have `image_size`, and patch i the row i of the table, behind that of the class token.
    "buckets": the sides of images are cut into as many equal parts as the table has; images may be smaller. "rope":
    there is no table; of the pairs of a head's dimensions, one half rotates by the line of a patch and the other one by
    its column, each with every second frequency (Pixtral). Images may be smaller."""
    shares_frequencies: bool = False
    """Whether both halves of "rope" have the same frequencies, which are those of lines (Qwen-VL)."""
    interpolates: bool = False
    """Whether there is a table of positions beside "rope", in a square. It is interpolated linearly to the lines and
    columns of an image, whose corners are those of the table."""
    windows: Windows | None = None
    """None: patches see the whole image. Only if they come as patches."""
    pixels: Pixels
    projector: Projector
    layer_rows: LayerRows = LayerRows()
    anyres: Anyres | None = None
    """None: the rows are those of the tiles, one after the other."""

    @property
    def side(self) -> int:
        """Patches of a side of the images that the table of positions is for."""
        return self.image_size // self.patch_size

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.side**2 + self.class_token if self.max_patches is None else self.max_patches

    @property
    def hidden_size(self) -> int:
        """Numbers of a row that the tower makes: the language model's hidden size."""
        return self.projector.matrices[-1].num_outputs

    @property
    def row_width(self) -> int:
        """Numbers of a row in the encoder cache: the hidden size, and as many for each layer of `layer_rows`."""
        return self.hidden_size * (1 + len(self.layer_rows.layers))

    @property
    def num_weights(self) -> int:
        """Numbers in its matrices, and in the table of positions."""
        config, found = self.encoder, 0
        for projector in (self.projector, *self.layer_rows.projectors):
            width = config.hidden_size * projector.merge**2
            for matrix in projector.matrices:
                found, width = found + width * matrix.num_outputs, matrix.num_outputs
        per_layer = 4 * config.num_heads * config.head_dim + (3 if config.gated else 2) * config.intermediate_size
        return found + config.hidden_size * (config.num_layers * per_layer + self.patch_width + config.max_position)

    def num_rows_of_patches(self, num: int, grid: tuple[int, ...]) -> int:
        """Rows of an image of `num` patches, with a grid of a frame and so many lines and columns of patches. Raises
        ValueError if the tower can't take it."""
        assert self.max_patches is not None
        merge = self.projector.merge
        frames, lines, columns = grid if len(grid) == 3 else (0, 0, 0)
        fits = frames == 1 and lines * columns == num <= self.max_patches
        if not fits or not lines or lines % merge or columns % merge or max(lines, columns) > self.side:
            words = f"up to {self.max_patches} in a frame of multiples of {merge}, up to {self.side} on a side"
            raise ValueError(f"an image of {num} patches, as {list(grid)}; this model's have {words}")
        return num // merge**2

    def num_rows(self, height: int, width: int) -> int:
        """Rows of an image of so many pixels. Raises ValueError if the tower can't take it."""
        step = self.patch_size * self.projector.merge * self.projector.mean
        most = self.side * self.patch_size
        fits = height == width == most if self.positions == "table" else 0 < height <= most and 0 < width <= most
        if not fits or height % step or width % step:
            words = (
                f"{most} x {most} pixels"
                if self.positions == "table"
                else f"multiples of {step} pixels, up to {most} x {most}"
            )
            raise ValueError(f"an image of {height} x {width} pixels; this model's have {words}")
        return (height // step) * (width // step)

    @classmethod
    def load(cls, folder: str | Path) -> "VisionConfig | None":
        """Read `vision.json`; None if there is none. Raises msgspec.ValidationError, which is a bug in prepare."""
        path = Path(folder) / VISION
        return msgspec.json.decode(read_file(path), type=cls) if path.is_file() else None

    def save(self, folder: str | Path) -> None:
        (Path(folder) / VISION).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
