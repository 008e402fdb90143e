"""Memory for logprobs: the log probability of an id, and the top ids with theirs.

A logprob record is float32 logprob · num_top × int32 ids · num_top × float32 logprobs. If the vocabulary has fewer ids
than that, the last ones are -1, with -inf. A row may give the ids: then the record has these, in their order. Entry i
belongs to the i-th row of logits.
"""

import ctypes
from typing import Any

import numpy as np

from pipeline.kernels.step_inputs import IntArray, LongArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
AddressArray = np.ndarray[Any, np.dtype[np.uint64]]
ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

NO_LOGPROBS = -1
"""`num_top` of a row without logprobs."""


class LogprobInputs:
    """Shapes are [max_num_rows]. Arrays keep their addresses. Each step with logprobs allocates new memory for the
    results, so the caller may keep the previous step's."""

    def __init__(self, max_num_rows: int) -> None:
        self.num_top: IntArray = np.zeros(max_num_rows, np.int32)
        self.addresses: AddressArray = np.zeros(max_num_rows, np.uint64)
        """Address of each record; 0 for none."""
        self.given_ids: AddressArray = np.zeros(max_num_rows, np.uint64)
        """Address of the row's own `num_top` ids, int32, which its owner keeps; 0 for the likeliest ids."""
        self.widths: LongArray = np.zeros(0, np.int64)
        """Bytes of each record; empty if no row requests logprobs"""
        self.memory: ByteArray = np.empty(0, np.uint8)
        """The records, concatenated."""

    def lay_out(self, num_top: IntArray, given_ids: AddressArray | None = None) -> None:
        """Allocate the records of a step's rows; `NO_LOGPROBS` for rows without."""
        num = len(num_top)
        self.given_ids[:num] = 0 if given_ids is None else given_ids
        self.widths = np.where(num_top >= 0, 4 + 8 * num_top.astype(np.int64), 0)
        ends = np.cumsum(self.widths)
        self.memory = np.empty(int(ends[-1]) if num else 0, np.uint8)
        self.num_top[:num] = num_top
        starts = (self.memory.ctypes.data + ends - self.widths).astype(np.uint64)
        self.addresses[:num] = np.where(self.widths > 0, starts, np.uint64(0))

    def clear(self, num: int) -> None:
        """Set `num` rows without logprobs."""
        if len(self.widths):
            self.widths, self.memory = self.widths[:0], self.memory[:0]
        self.addresses[:num] = 0

    def views(self, i: int) -> tuple[FloatArray, IntArray, FloatArray]:
        """Views of a record to write: logprob [1], ids [num_top], their logprobs [num_top]."""
        num_top, begin = int(self.num_top[i]), int(self.addresses[i]) - self.memory.ctypes.data
        words = self.memory[begin : begin + 4 + 8 * num_top].view(np.float32)
        return words[:1], words[1 : 1 + num_top].view(np.int32), words[1 + num_top :]

    def given(self, i: int) -> IntArray | None:
        """The ids that row i gives, or None."""
        if not (address := int(self.given_ids[i])):
            return None
        return np.ctypeslib.as_array((ctypes.c_int32 * int(self.num_top[i])).from_address(address))


class ScoreInputs:
    """Given ids to compute logprobs for, such as a prompt's. Shapes are [max_num_rows]."""

    def __init__(self, max_num_rows: int) -> None:
        self.num = 0
        self.token_indices: LongArray = np.zeros(max_num_rows, np.int64)
        """Tokens of the last step, whose logits score the ids."""
        self.ids: IntArray = np.zeros(max_num_rows, np.int32)
        self.logprobs = LogprobInputs(max_num_rows)

    def fill(self, token_indices: LongArray, ids: IntArray, num_top: IntArray) -> None:
        self.num = len(token_indices)
        self.token_indices[: self.num] = token_indices
        self.ids[: self.num] = ids
        self.logprobs.lay_out(num_top)
