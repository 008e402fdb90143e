"""The coordinates of tokens in a prompt with images, for M-RoPE (`get_rope_index` in transformers).

A text counts on from what is before it. An image begins there, too: each of its rows has that frame, and its own line
and column on top of that. What follows begins behind the largest coordinate, so that its positions are shifted:

    position      0  1  2  3  4  5  6  7  8       an image of 2 lines of 3 rows behind two tokens
    frame         0  1  2  2  2  2  2  2  5
    line          0  1  2  2  2  3  3  3  5
    column        0  1  2  3  4  2  3  4  5
"""

from collections.abc import Sequence

import numpy as np

from pipeline.kernels.step_angles import StepAngles
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.rope import rope_table, rotations

AXES = 3
"""Frame, line and column."""


class RowCoordinates:
    """Owns those of the rows whose prompts have images."""

    def __init__(self, max_num_seqs: int, merge: int) -> None:
        """Squares of `merge` x `merge` patches are a row of embeddings."""
        self._merge = merge
        self._ends: IntArray = np.zeros(max_num_seqs, np.int32)
        """The position behind each row's last image; 0 without images."""
        self._shifts: IntArray = np.zeros(max_num_seqs, np.int32)
        """What is added to positions from there on."""
        self._known: list[IntArray | None] = [None] * max_num_seqs
        """Of the positions before there, [AXES, end]."""

    def add(self, row: int, grids: Sequence[Sequence[int]]) -> None:
        """A sequence takes a row; `grids` are as in `RowAdd`."""
        pieces, end, shift = [], 0, 0
        for first, _, *sides in grids:
            lines, columns = (side // self._merge for side in sides)
            begin = first + shift
            pieces.append(np.broadcast_to(np.arange(end + shift, begin), (AXES, first - end)))
            line, column = np.divmod(np.arange(lines * columns), columns)
            pieces.append(begin + np.stack([np.zeros_like(line), line, column]))
            end = first + lines * columns
            shift = begin + max(lines, columns) - end
        self._ends[row], self._shifts[row] = end, shift
        self._known[row] = np.concatenate(pieces, axis=1).astype(np.int32) if pieces else None

    def of(self, rows: IntArray, positions: "IntArray | LongArray") -> LongArray | None:
        """The coordinates of tokens, [AXES, tokens], at these positions of these rows; None if all are the position."""
        ends = self._ends[rows]
        if not np.count_nonzero(ends):
            return None
        found: LongArray = np.tile(positions + self._shifts[rows], (AXES, 1)).astype(np.int64)
        within = np.flatnonzero(positions < ends)
        for row in dict.fromkeys(rows[within].tolist()):
            known, own = self._known[row], within[rows[within] == row]
            assert known is not None
            found[:, own] = known[:, positions[own]]
        return found


def angles_of(config: ModelConfig, max_model_len: int, max_num_tokens: int) -> StepAngles | None:
    """The angles of a model whose tokens have coordinates; None for other models."""
    if config.rope_axes is None:
        return None
    found = {key: one for key, one in rotations(config, max_model_len).items() if key[0] is not None}
    assert len(found) == 1, "a model with coordinates has one rotary embedding"
    (rotation,) = found.values()
    axes = np.zeros(len(rotation.frequencies), np.int64)
    axes[: len(config.rope_axes)] = config.rope_axes
    cos, sin = rope_table(rotation.frequencies, max_model_len, rotation.magnitudes)
    return StepAngles(cos, sin, axes, max_num_tokens)
