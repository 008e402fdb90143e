"""What is computed in numpy between the layers of a vision tower and its projector: norms, and squares of patches.

Each row is computed by itself, so it has the same bits alone and in any batch.
"""

import math

import numpy as np

from pipeline.kernels.patches import squares
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import LongArray
from pipeline.runtime.model.model_config import NormKind
from pipeline.runtime.model.vision_config import Projector, VisionConfig
from pipeline.stages.execute.program import Norm


def normalized(x: FloatArray, norm: Norm, kind: NormKind, eps: float) -> FloatArray:
    """x [rows, width] float32 after a norm whose arrays are float32."""
    if kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(eps))
    out: FloatArray = x * factor * np.asarray(norm.weight)
    if norm.bias is not None:
        out += np.asarray(norm.bias)
    return out


def rows_of(
    x: FloatArray, grid: tuple[int, int], projector: Projector, norm: Norm | None, *, by_squares: bool = False
) -> FloatArray:
    """The projector's input [rows, hidden_size * merge ** 2], of the hidden states [patches, hidden_size] of an image
    with a grid of so many lines and columns of patches. `by_squares`: those of a square follow one another."""
    lines, columns = grid
    if projector.mean > 1:
        x = x[squares(lines, columns, projector.mean)].mean(axis=1, dtype=np.float32)
        lines, columns = lines // projector.mean, columns // projector.mean
    if norm is not None and not projector.norms_squares:
        assert projector.norm is not None
        x = normalized(x, norm, projector.norm, projector.norm_eps)
    if projector.merge > 1:
        x = x if by_squares else x[squares(lines, columns, projector.merge)]
        x = x.reshape(-1, projector.merge**2 * x.shape[-1])
    if norm is not None and projector.norms_squares:
        assert projector.norm is not None
        x = normalized(x, norm, projector.norm, projector.norm_eps)
    return x


def position_rows(vision: VisionConfig, lines: int, columns: int) -> LongArray:
    """The row of each token of an image in the table of positions."""
    if vision.positions == "table":
        return np.arange(lines * columns + vision.class_token, dtype=np.int64)
    side = vision.side
    of_lines, of_columns = _buckets(lines, side), _buckets(columns, side)
    rows: LongArray = (of_lines[:, None] * side + of_columns).reshape(-1)
    return rows


def coordinates(vision: VisionConfig, lines: int, columns: int) -> LongArray:
    """The line and the column of each patch of an image, [2, patches]."""
    order = np.arange(lines * columns)
    if vision.max_patches is not None:
        order = squares(lines, columns, vision.projector.merge).reshape(-1)
    found: LongArray = np.stack(np.divmod(order, columns)).astype(np.int64)
    return found


AT_ONCE = 1024
"""Patches whose positions are interpolated at once, so that memory is read while it is in a cache."""


def interpolate(table: FloatArray, grid: tuple[int, int], where: LongArray, out: FloatArray) -> None:
    """out = the positions of the patches at `where` [2, patches], of an image with a grid of so many lines and columns:
    those of a square table [side * side, width], whose corners are the image's corners
    (`get_vision_interpolation_indices_and_weights` in transformers)."""
    side, low, part = math.isqrt(len(table)), [], []
    for axis, num in zip(where, grid, strict=True):
        points = axis.astype(np.float32) * np.float32(side - 1) / np.float32(max(num - 1, 1))
        low.append(points.astype(np.int64))
        part.append((points - low[-1])[:, None])
    (top, left), (down, right) = low, part
    bottom, end = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    taps = (
        (top * side + left, (1 - down) * (1 - right)),
        (top * side + end, (1 - down) * right),
        (bottom * side + left, down * (1 - right)),
        (bottom * side + end, down * right),
    )
    for begin in range(0, len(out), AT_ONCE):
        piece = slice(begin, begin + AT_ONCE)
        out[piece] = sum(table[index[piece]] * factor[piece] for index, factor in taps)


def by_windows(vision: VisionConfig, lines: int, columns: int) -> tuple[LongArray, LongArray]:
    """The patches of an image that come by squares, one window after the other, from left to right, then the ones
    below: their numbers [patches], and how many each window has [windows]."""
    assert vision.windows is not None
    merge, side = vision.projector.merge, vision.windows.side
    line, column = np.divmod(np.arange(lines * columns // merge**2), columns // merge)
    window = line // side * -(-columns // merge // side) + column // side
    order = window.argsort(kind="stable")[:, None] * merge**2 + np.arange(merge**2)
    return order.reshape(-1).astype(np.int64), np.bincount(window).astype(np.int64) * merge**2


def _buckets(num: int, side: int) -> LongArray:
    """The part of each of `num` patches of a side, among `side` equal parts of it (`Idefics3VisionEmbeddings` in
    transformers, whose numbers are float32)."""
    step = 1 / side
    boundaries = (step + np.arange(np.ceil((1 - step) / step)) * step).astype(np.float32)
    begins = np.arange(num, dtype=np.float32) * (np.float32(1) / np.float32(num))
    found: LongArray = np.searchsorted(boundaries, np.minimum(begins, np.float32(1 - 1e-6)), side="right")
    return found.astype(np.int64)


MOST = 1.1
"""Lines and columns are as many as given by the limit, or this many times as many, before rows are interpolated."""


def packed(rows: FloatArray, grid: tuple[int, ...], max_tiles: int, newline: FloatArray) -> FloatArray:
    """The rows [rows, width] of an image in tiles, of their rows [tiles, rows of a tile, width], as `Anyres` says.
    `grid` is that of LlavaOnevision in pipeline/media/processed.py (`pack_image_features` in transformers)."""
    lines, columns, height, width = grid
    tiles, side = rows[1:], math.isqrt(rows.shape[1])
    whole = tiles.reshape(lines, columns, side, side, -1).swapaxes(1, 2).reshape(lines * side, columns * side, -1)
    all_lines, all_columns = whole.shape[:2]
    if width / height > all_columns / all_lines:
        padding = (all_lines - int(round(height * (all_columns / width), 7))) // 2
        whole = whole[padding : all_lines - padding]
    else:
        padding = (all_columns - int(round(width * (all_lines / height), 7))) // 2
        whole = whole[:, padding : all_columns - padding]
    ratio = math.sqrt(whole.shape[0] * whole.shape[1] / (max_tiles * side**2))
    if ratio > MOST:
        whole = _resized(whole, int(whole.shape[0] // ratio), int(whole.shape[1] // ratio))
    ends = np.broadcast_to(newline, (len(whole), 1, len(newline)))
    return np.concatenate([rows[0], np.concatenate([whole, ends], axis=1).reshape(-1, len(newline))])


def _resized(x: FloatArray, lines: int, columns: int) -> FloatArray:
    """x [lines, columns, width] interpolated linearly to another size, as torch does with `align_corners=False`."""
    for axis, size in enumerate((lines, columns)):
        before = x.shape[axis]
        points = np.maximum((np.arange(size) + 0.5) * (before / size) - 0.5, 0)
        low = points.astype(np.int64)
        part = (points - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        high = np.minimum(low + 1, before - 1)
        x = x.take(low, axis) * (1 - part) + x.take(high, axis) * part
    return x
