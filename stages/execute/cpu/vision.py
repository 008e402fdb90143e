"""A vision tower on a CPU: pixels to rows of embeddings of the language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config.settings import Settings
from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.kernels.patches import CENTER, PatchInputs, PixelArray, cut
from pipeline.kernels.sampling.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, LongArray, StepInputs
from pipeline.runtime.messages import NUM_PARTS
from pipeline.runtime.model.kv_groups import scratch
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.cpu.backend import Library, library_of_draft
from pipeline.stages.execute.cpu.native.tower import NativeTower
from pipeline.stages.execute.cpu.precision import with_activations
from pipeline.stages.execute.cpu.program import ProgramPlan
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.vision.hidden_states import (
    by_windows,
    coordinates,
    interpolate,
    normalized,
    packed,
    position_rows,
    rows_of,
)
from pipeline.stages.execute.vision.tower import (
    angles_of,
    build,
    computed_config,
    newline_of,
    projector_norms,
    projectors,
)
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights

if TYPE_CHECKING:
    from pipeline.stages.execute.cpu.pytorch.tower import TorchTower

STEP_TOKENS = 1024
"""Tokens of a step at the most, if no image has more. The matrices are read once for so many."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, or its tiles, which have one size."""

    pixels: PixelArray
    """uint8 [tiles, channels, height, width], or if images come as patches, [patches, channels, side, side]"""
    grid: tuple[int, ...] = ()
    """As in `ProcessedImage`."""


@dataclass(frozen=True, slots=True)
class Tile:
    """An image, or a part of one, and where its rows go."""

    pixels: PixelArray
    """uint8 [channels, height, width], or patches"""
    out: FloatArray
    """float32 [rows, row_width]"""
    grid: tuple[int, int]
    num_tokens: int


class VisionEncoder:
    """The tower of a prepared model. `encode` computes images one step after the other; each has the same bits alone
    and beside others."""

    def __init__(
        self, settings: Settings, folder: Path, vision: VisionConfig, num_threads: int, of_model: Library | None
    ) -> None:
        """`of_model` is the library of the language model. Raises UserError if a tensor is missing, the memory does not
        suffice, or the settings name kernels that can't compute the tower."""
        self.config = vision
        config = computed_config(vision)
        library = library_of_draft(settings, config, of_model) if of_model is not None else None
        float_format = FLOAT_FORMATS[settings.execute.dtype]
        weights = Weights(folder, vision.encoder, float_format, keeps_floats=library is not None)
        _require_room(vision, 2 if library is not None or float_format == "bf16" else 4)
        settings = with_activations(settings, weights, library)
        most = max(STEP_TOKENS, vision.max_num_tokens)
        self._max_num_tokens = most
        max_num_tiles = max(1, most // (vision.max_num_tokens if vision.positions == "table" else BLOCK_SIZE))
        self._max_num_tiles = max_num_tiles
        num_blocks = -(-most // BLOCK_SIZE) + max_num_tiles
        max_blocks = -(-vision.max_num_tokens // BLOCK_SIZE)
        sizes = most, max_num_tiles, max_blocks
        self._inputs = StepInputs(*sizes, max_num_samples=1, is_causal=False, angles=angles_of(vision, most))
        if vision.windows is not None:
            square = vision.projector.merge**2
            max_num_windows = -(-most // square)
            self._inputs.add_windows(max_num_windows, -(-(vision.windows.side**2 * square) // BLOCK_SIZE))
            num_blocks += max_num_windows
        self._patches = PatchInputs(most, vision.patch_width)
        layout = scratch(config.num_layers)
        plan = ProgramPlan(
            settings=settings,
            config=config,
            inputs=self._inputs,
            sampling_inputs=SamplingInputs(1, config.vocab_size),
            scores=ScoreInputs(1),
            kv=KVPlan(num_blocks, max(vision.max_num_tokens, 1), layout, touches=False),
            num_threads=num_threads,
        )
        self.program = _make(library, plan, self._patches)
        self._positions = build(vision, weights, self.program, -(-most // vision.projector.merge**2), float_format)
        self._norm, self._newline = self.program.last_norm, newline_of(vision, weights)
        self._projectors = list(zip(projectors(vision).values(), projector_norms(vision, weights), strict=True))

    def encode(self, items: Sequence[MediaItem], out: Sequence[FloatArray]) -> None:
        """Write the rows of each item, float32 [rows, row_width]. Without `anyres` they are those of the tiles, one
        after the other. Raises ValueError for pixels or rows that the tower can't take."""
        self.begin(items, out).run(NUM_PARTS)

    def begin(self, items: Sequence[MediaItem], out: Sequence[FloatArray]) -> "Encoding":
        """The same in parts, which `Encoding.run` computes. The tower computes one encoding at a time."""
        makes = [self._tile_rows(item, rows) for item, rows in zip(items, out, strict=True)]
        tiles = [tile for item, rows in zip(items, makes, strict=True) for tile in self._tiles(item, rows)]
        steps: list[list[Tile]] = []
        num = 0
        for tile in tiles:
            num += tile.num_tokens
            if not steps or len(steps[-1]) == self._max_num_tiles or num > self._max_num_tokens:
                steps.append([])
                num = tile.num_tokens
            steps[-1].append(tile)
        return Encoding(self, steps, lambda: self._pack(items, makes, out))

    def _pack(self, items: Sequence[MediaItem], makes: Sequence[FloatArray], out: Sequence[FloatArray]) -> None:
        """Make rows of those of the tiles."""
        for item, tile_rows, rows in zip(items, makes, out, strict=True):
            if self._newline is not None and self.config.anyres is not None:
                made = packed(tile_rows, item.grid, self.config.anyres.max_tiles, self._newline)
                if made.shape != rows.shape:
                    raise ValueError(f"rows are {list(rows.shape)}; this image has {list(made.shape)}")
                rows[:] = made

    def num_tile_rows(self, item: MediaItem) -> int:
        """Rows of each tile. Raises ValueError for pixels that the tower can't take."""
        num, channels, height, width = item.pixels.shape
        if item.pixels.dtype != np.uint8 or channels != self.config.num_channels:
            raise ValueError(f"pixels are {item.pixels.dtype} with {channels} channels, not uint8 with 3")
        if self.config.max_patches is not None:
            return self.config.num_rows_of_patches(num, item.grid)
        return self.config.num_rows(height, width)

    def close(self) -> None:
        """Free threads and memory."""
        self.program.close()

    def _tile_rows(self, item: MediaItem, out: FloatArray) -> FloatArray:
        """Memory for the rows of the tiles, [tiles, rows of a tile, row_width]: `out`, unless they are packed."""
        num_tiles = len(item.pixels) if self.config.max_patches is None else 1
        shape = num_tiles, self.num_tile_rows(item), self.config.row_width
        if self.config.anyres is not None:
            return np.empty(shape, np.float32)
        num_rows = shape[0] * shape[1]
        if out.shape != (num_rows, shape[2]) or out.dtype != np.float32:
            raise ValueError(f"rows are {out.dtype} {list(out.shape)}, not float32 {[num_rows, shape[2]]}")
        return out.reshape(shape)

    def _tiles(self, item: MediaItem, out: FloatArray) -> list[Tile]:
        if self.config.max_patches is not None:
            _, lines, columns = item.grid
            return [Tile(item.pixels, out[0], (lines, columns), lines * columns)]
        size = self.config.patch_size
        grid = item.pixels.shape[2] // size, item.pixels.shape[3] // size
        num_tokens = grid[0] * grid[1] + self.config.class_token
        return [Tile(pixels, rows, grid, num_tokens) for pixels, rows in zip(item.pixels, out, strict=True)]

    def finish(self, tiles: list[Tile]) -> None:
        """Write the rows of some tiles, whose hidden states the program has computed."""
        width = self.config.hidden_size
        for i, hidden in enumerate(self._hidden_states()):
            rows = self._projector_rows(tiles, hidden, i)
            made, begin = self.program.projected(rows, i), 0
            for tile in tiles:
                tile.out[:, i * width : (i + 1) * width] = made[begin : begin + len(tile.out)]
                begin += len(tile.out)

    def _hidden_states(self) -> list[FloatArray]:
        """What each projector reads, float32 [tokens, hidden_size of the tower]."""
        vision, program, last = self.config, self.program, self.program.residual()
        num, layers, width = vision.encoder.num_layers, vision.layer_rows.layers, vision.encoder.hidden_size
        captured = program.captured() if program.captured_layers else last[:, :0]
        behind = [last if layer + 1 == num else captured[:, i * width :][:, :width] for i, layer in enumerate(layers)]
        return [last, *behind]

    def _projector_rows(self, tiles: list[Tile], hidden: FloatArray, index: int) -> FloatArray:
        """The rows of a projector's input, of hidden states of the tokens of some tiles."""
        vision, class_token, begin = self.config, int(self.config.class_token), 0
        projector, projector_norm = self._projectors[index]
        rows = []
        for tile in tiles:
            x = hidden[begin + class_token : begin + tile.num_tokens]
            if vision.windows is not None:
                x = x[by_windows(vision, *tile.grid)[0].argsort()]
            begin += tile.num_tokens
            if self._norm is not None and not index:
                x = normalized(x, self._norm, vision.encoder.norm, vision.encoder.rms_norm_eps)
            by_squares = vision.max_patches is not None
            rows.append(rows_of(x, tile.grid, projector, projector_norm, by_squares=by_squares))
        return np.concatenate(rows)

    def fill(self, tiles: list[Tile]) -> None:
        """Set the step of some tiles."""
        vision, class_token = self.config, int(self.config.class_token)
        counts: IntArray = np.array([tile.num_tokens for tile in tiles], np.int32)
        ids, zeros = np.zeros(counts.sum(), np.int32), np.zeros(len(tiles), np.int32)
        turns = vision.positions == "rope"
        windows = [by_windows(vision, *tile.grid) if vision.windows is not None else None for tile in tiles]
        where = None
        if turns:
            found = [coordinates(vision, *tile.grid) for tile in tiles]
            found = [one if by is None else one[:, by[0]] for one, by in zip(found, windows, strict=True)]
            where = np.concatenate(found, axis=1)
        self._inputs.fill(ids, zeros, counts, _tables(counts), zeros.astype(np.bool_), coordinates=where)
        if (inputs := self._inputs.windows) is not None:
            counts = np.concatenate([by[1] for by in windows if by is not None]).astype(np.int32)
            inputs.fill(ids, np.zeros_like(counts), counts, _tables(counts), np.zeros(len(counts), np.bool_))
        residual, begin = self.program.residual(), 0
        for tile, by in zip(tiles, windows, strict=True):
            end = begin + tile.num_tokens
            self._patches.pixels[begin : begin + class_token] = CENTER
            has_patches = vision.max_patches is not None
            patches = (
                tile.pixels.reshape(-1, vision.patch_width) if has_patches else cut(tile.pixels, vision.patch_size)
            )
            self._patches.pixels[begin + class_token : end] = patches if by is None else patches[by[0]]
            if vision.interpolates and where is not None:
                interpolate(self._positions, tile.grid, where[:, begin:end], residual[begin:end])
            elif turns:
                residual[begin:end] = self._positions
            else:
                np.take(self._positions, position_rows(vision, *tile.grid), axis=0, out=residual[begin:end])
            begin = end


class Encoding:
    """The computation of some items in parts: the ops of the program, for one step of tiles after the other."""

    def __init__(self, encoder: VisionEncoder, steps: list[list[Tile]], finish: Callable[[], None]) -> None:
        """`finish` is called behind the last part."""
        self._encoder, self._steps, self._finish = encoder, steps, finish
        num_tokens = np.array([sum(tile.num_tokens for tile in tiles) for tiles in steps], np.float64)
        self._ends = np.cumsum(num_tokens) / num_tokens.sum() * NUM_PARTS
        """Of each step."""
        self._step = self._first = 0
        """The step that is computed, and its first op that is not."""
        self._op_ends: LongArray = np.zeros(0, np.int64)
        """Of each op of this step; empty before it."""

    def run(self, end: int) -> bool:
        """Compute the parts that lack up to `end`, of NUM_PARTS. Returns whether the items have their rows."""
        program = self._encoder.program
        while self._step < len(self._steps):
            tiles, is_last = self._steps[self._step], self._step == len(self._steps) - 1
            begin = 0.0 if self._step == 0 else self._ends[self._step - 1]
            if not self._first:
                self._encoder.fill(tiles)
                costs = program.op_costs().astype(np.float64)
                size = self._ends[self._step] - begin
                self._op_ends = np.ceil(begin + costs.cumsum() / costs.sum() * size).astype(np.int64)
            num_ops = len(self._op_ends)
            last = num_ops if is_last and end == NUM_PARTS else int(self._op_ends.searchsorted(end, "right"))
            last = min(last, num_ops - 1 if is_last and end < NUM_PARTS else num_ops)
            if last > self._first:
                program.run_ops(self._first, last)
                self._first = last
            if last < num_ops:
                return False
            self._encoder.finish(tiles)
            self._step, self._first = self._step + 1, 0
        self._finish()
        return True


def _tables(counts: IntArray) -> IntArray:
    """The block tables of entries of so many tokens, one behind the other: [entries, blocks]. Entries after an entry's
    own blocks are not read."""
    num_blocks = -(-counts // BLOCK_SIZE)
    table: IntArray = ((np.cumsum(num_blocks) - num_blocks)[:, None] + np.arange(num_blocks.max())).astype(np.int32)
    return table


def _make(library: Library | None, plan: ProgramPlan, patches: PatchInputs) -> "NativeTower | TorchTower":
    """An empty program of the library, or of torch."""
    if library is not None:
        return NativeTower(library.loaded, library.isa, plan, patches)
    from pipeline.stages.execute.cpu.pytorch.tower import TorchTower

    return TorchTower(plan, patches)


def _require_room(vision: VisionConfig, item_bytes: int) -> None:
    num_bytes, available = vision.num_weights * item_bytes, available_bytes()
    if num_bytes > available:
        raise UserError(
            f"the vision tower of {vision.encoder.name} takes {size_words(num_bytes, up=True)}, but only "
            f"{size_words(available)} of memory are free: lower execute.kv_cache_bytes"
        )
