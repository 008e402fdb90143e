"""The parameters of a row's logits processors, as the samplers read them. kernels/sampling/logits_processors.py
describes what they do."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.kernels.step_inputs import IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
WordArray = np.ndarray[Any, np.dtype[np.uint32]]

NO_IDS: IntArray = np.zeros(0, np.int32)
NO_VALUES: FloatArray = np.zeros(0, np.float32)

BEGIN = -1
"""First id of a bad word that only the beginning of the output matches."""

LOGITS_PROCESSORS = np.dtype(
    [
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("num_prompt", "<i4"),
        ("ids", "<u8"),
        ("allowed", "<u8"),
        ("bias_ids", "<u8"),
        ("bias_values", "<u8"),
        ("enders", "<u8"),
        ("runs", "<u8"),
        ("num_bias", "<i4"),
        ("num_enders", "<i4"),
        ("min_tokens", "<i4"),
        ("num_runs", "<i4"),
    ]
)
"""`LogitsProcessors` of kernels/cpu/logits_processors.h: numbers, and addresses of the arrays of the class below."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitsProcessors:
    """The logits processors of a row. All ids are below V."""

    ids: IntArray
    """The row's ids; a step knows the first `num_known`."""
    num_prompt: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: IntArray = field(default_factory=lambda: NO_IDS)
    bias_values: FloatArray = field(default_factory=lambda: NO_VALUES)
    """Parallel; added to their logits."""
    allowed: WordArray | None = None
    """[ceil(V / 32)]; as `bits_of` makes it"""
    runs: IntArray = field(default_factory=lambda: NO_IDS)
    """Bad words, as `pack_runs` makes them."""
    num_runs: int = 0
    enders: IntArray = field(default_factory=lambda: NO_IDS)
    """Ids that are not sampled before the output has `min_tokens` ids. No duplicates."""
    min_tokens: int = 0

    def write(self, to: "np.ndarray[Any, Any]", index: int) -> None:
        """Write it to an array of `LOGITS_PROCESSORS` for the CPU library; valid while this object lives."""
        to[index] = (
            *(self.repetition, self.presence, self.frequency, self.num_prompt),
            self.ids.ctypes.data,
            0 if self.allowed is None else self.allowed.ctypes.data,
            *(array.ctypes.data for array in (self.bias_ids, self.bias_values, self.enders, self.runs)),
            *(len(self.bias_ids), len(self.enders), self.min_tokens, self.num_runs),
        )


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def bits_of(ids: IntArray, vocab_size: int) -> WordArray:
    """A mask that allows these ids: bit v % 32 of word v / 32, as llguidance writes it."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[ids] = 1
    words: WordArray = np.packbits(bits, bitorder="little").view("<u4")
    return words


def pack_runs(runs: Sequence[Sequence[int]], vocab_size: int) -> tuple[IntArray, int]:
    """Bad words in the format of `LogitsProcessors.runs`, and their number N: N + 1 places in the array, where each
    begins and the last ends, then the ids. The shortest come first, so that those which are compared together have
    about the same length. Words that come again, are empty or have ids outside the vocabulary are left out, but the
    first of several ids may be BEGIN."""
    whole = sorted({run for run in map(tuple, runs) if run}, key=len)
    ids = np.fromiter(itertools.chain.from_iterable(whole), np.int64)
    lengths = np.fromiter(map(len, whole), np.int64)
    starts = np.cumsum(lengths) - lengths
    wrong = (ids < 0) | (ids >= vocab_size)
    wrong[starts[lengths > 1]] &= ids[starts[lengths > 1]] != BEGIN
    if wrong.any():
        known = ~np.logical_or.reduceat(wrong, starts)
        ids, lengths = ids[np.repeat(known, lengths)], lengths[known]
    num = len(lengths)
    if not num:
        return NO_IDS, 0
    return np.concatenate(([num + 1], num + 1 + np.cumsum(lengths), ids)).astype(np.int32), num
