"""Small programs of a few ops of the CPU library, recorded by hand, in memory with canaries at both ends.

Inputs and outputs are numpy arrays in the order of the reference. This file repeats the library's memory layouts, from
the comments in kernels/cpu/*.h. References are float64 and include a bound for float32 rounding errors.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import Matrix
from pipeline.kernels.sampling.logprob_inputs import ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, StepInputs
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.quantized import (
    BLOCK,
    EPS,
    GROUP,
    MOST,
    MOST_BLOCK_SUM,
    PANEL,
    SUMMED,
    ActivationArray,
    bases_of,
    joined,
    quantize_blocks,
    quantize_rows,
    read_floats,
    split,
    to_bf16,
)

CANARY = 0xA5
GUARD_BYTES = 256

ACTIVATIONS: Literal["int12", "int8", "blocks"] = "int12"
"""For weights of 4 to 6 bits; the fixture `format` sets it."""


class Recording:
    """One program. Every run checks the canaries before and behind its memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        threads: int = 1,
        tokens: int = 64,
        rows: int = 64,
        blocks: int = 32,
        *,
        is_causal: bool = True,
    ) -> None:
        self.library = library
        self.wide = library.act_bytes() == 4
        self.has_tiles = library.activation_rows(1) > 1
        """Of AMX"""
        self.inputs = StepInputs(tokens, rows, blocks, is_causal=is_causal)
        self.sampling_inputs = SamplingInputs(rows, 4096)
        self.scores = ScoreInputs(rows)
        self.ticket = native.MaskTicket(None, 0, 0)
        self.thread_pool = native_library.ThreadPool(library, threads)
        self._guarded: list[np.ndarray] = []
        self._kept: list[Any] = []
        inputs = self.inputs
        self.arrays = native.NativeStepArrays(
            **{name: getattr(inputs, name).ctypes.data for name in ("starts", "counts", "offsets", "block_tables")},
            **{name: getattr(inputs, name).ctypes.data for name in ("ids", "positions", "slots", "sampled")},
            max_blocks=blocks,
            key_ends=None if inputs.key_ends is None else inputs.key_ends.ctypes.data,
        )
        self.program = library.program_new(self.thread_pool.handle, ctypes.byref(self.arrays))
        self.fill([(0, 1)])

    def close(self) -> None:
        self.library.program_delete(self.program)
        self.thread_pool.close()

    # --- memory

    def memory(self, num_bytes: int) -> np.ndarray:
        """Bytes that start at a cache line, each CANARY, with more of them around."""
        whole = np.full(num_bytes + 2 * GUARD_BYTES + 64, CANARY, np.uint8)
        begin = GUARD_BYTES + -(whole.ctypes.data + GUARD_BYTES) % 64
        self._kept.append(whole)
        self._guarded += [whole[:begin], whole[begin + num_bytes :]]
        return whole[begin : begin + num_bytes]

    def floats(self, values: np.ndarray) -> np.ndarray:
        """A copy of a float32 array that an op may read and write."""
        array = self.memory(values.size * 4).view(np.float32).reshape(values.shape)
        array[:] = values
        return array

    def kept(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def rows(self, num: int, width: int) -> native.NativeRows:
        """Memory for activations of either form."""
        stride = max(self.library.activation_bytes(form, width) for form in ActivationForm)
        return self.wide_rows(self.library.activation_rows(num), stride)

    def wide_rows(self, num: int, stride: int) -> native.NativeRows:
        memory = self.memory(num * stride)
        rows = native.NativeRows(memory.ctypes.data, stride)
        self._kept.append(rows)
        rows.memory = memory.reshape(num, stride)
        return rows

    # --- activations

    def as_act(self, values: np.ndarray) -> np.ndarray:
        """As plain activations store values for this instruction set."""
        return values if self.wide else to_bf16(values)

    def put(self, rows: native.NativeRows, values: np.ndarray, form: ActivationForm) -> ActivationArray:
        """Store float32 values as the input of a product. Returns what the product reads."""
        num, width = values.shape
        memory = rows.memory
        if form is ActivationForm.PLAIN:
            kept = self.as_act(values)
            bits = kept if self.wide else (kept.view(np.uint32) >> 16).astype(np.uint16)
            memory[:num, : bits.itemsize * width] = np.ascontiguousarray(bits).view(np.uint8)
            return ActivationArray(kept.astype(np.float64), kept, np.ones((num, 1)))
        if form is ActivationForm.BLOCKS:
            codes, scales = quantize_blocks(values)
            lower = (codes + 128) % 256 - 128
            groups = np.stack([(codes - lower) // 256, lower], 1).astype(np.int8).reshape(num, 2, -1, GROUP)
            sums, halves = (codes.reshape(num, -1, size).sum(-1, dtype=np.int32) for size in (GROUP, GROUP // 2))
            blocks = [
                *(
                    codes.reshape(num, -1, 4)[:, :, [0, 2, 1, 3]].reshape(num, width),
                    groups.swapaxes(1, 2).reshape(num, -1),
                ),
                *(scales, scales.repeat(BLOCK // GROUP, axis=1) * sums.astype(np.float32), -32 * halves),
            ]
            packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in blocks], axis=1)
            memory[:num, : packed.shape[1]] = packed
            return self.read_blocks(rows, num, width)
        codes, scales = quantize_rows(values, form)
        parts = [split(codes) if form is ActivationForm.SPLIT else codes, scales]
        if form in SUMMED:
            sums = codes.reshape(num, -1, GROUP).sum(-1, dtype=np.int32)
            parts += [sums, scales * sums.astype(np.float32), bases_of(codes)]
        packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
        memory[:num, : packed.shape[1]] = packed
        return self.read_groups(rows, num, width, form)

    def read_plain(self, rows: native.NativeRows, num: int, width: int) -> np.ndarray:
        if self.wide:
            return read_floats(rows, num, width)
        words = np.ascontiguousarray(rows.memory[:num, : 2 * width]).view(np.uint16)
        return (words.astype(np.uint32) << 16).view(np.float32)

    def read_blocks(self, rows: native.NativeRows, num: int, width: int) -> ActivationArray:
        """Codes and scales of `ActivationForm.BLOCKS`. Also checks what else is stored of them."""
        sizes = 2 * width, 2 * width, 4 * width // BLOCK, 4 * width // GROUP, 8 * width // GROUP
        memory = np.split(np.ascontiguousarray(rows.memory[:num, : sum(sizes)]), np.cumsum(sizes)[:-1], axis=1)
        types = np.int16, np.int8, np.float32, np.float32, np.int32
        words, halves_of_codes, scales, scaled, halves = (
            np.ascontiguousarray(part).view(dtype) for part, dtype in zip(memory, types, strict=True)
        )
        codes = words.reshape(num, -1, 4)[:, :, [0, 2, 1, 3]].reshape(num, width)
        split_codes = halves_of_codes.reshape(num, -1, 2, GROUP).astype(np.int32)
        np.testing.assert_array_equal((256 * split_codes[:, :, 0] + split_codes[:, :, 1]).reshape(num, width), codes)
        sums, sums_of_halves = (codes.reshape(num, -1, size).sum(-1, dtype=np.int32) for size in (GROUP, GROUP // 2))
        np.testing.assert_array_equal(scaled, scales.repeat(BLOCK // GROUP, axis=1) * sums.astype(np.float32))
        np.testing.assert_array_equal(halves, -32 * sums_of_halves)
        assert np.abs(codes.astype(np.int32)).reshape(num, -1, 64).sum(-1).max() < MOST_BLOCK_SUM
        return ActivationArray(codes.astype(np.float64) * scales.astype(np.float64).repeat(BLOCK, 1), codes, scales)

    def read_groups(self, rows: native.NativeRows, num: int, width: int, form: ActivationForm) -> ActivationArray:
        """Codes and scales. Also checks the sums that follow the bytes."""
        groups = width // GROUP
        codes_type = np.dtype(np.int16 if form is ActivationForm.WORDS else np.int8)
        begin = width if form is ActivationForm.BYTES else 2 * width
        memory = np.ascontiguousarray(rows.memory[:num, : begin + 20 * groups])
        codes = np.ascontiguousarray(memory[:, :begin]).view(codes_type)
        if form is ActivationForm.SPLIT:
            codes = joined(codes)
        scales, sums, scaled = (
            np.ascontiguousarray(memory[:, begin + 4 * groups * i :][:, : 4 * groups]).view(dtype)
            for i, dtype in enumerate((np.float32, np.int32, np.float32))
        )
        if form in SUMMED:
            assert np.array_equal(sums, codes.reshape(num, groups, GROUP).sum(-1, dtype=np.int32))
            assert np.array_equal(scaled, scales * sums.astype(np.float32), equal_nan=True)
            bases = np.ascontiguousarray(memory[:, begin + 12 * groups :]).view(np.float32)
            assert np.array_equal(bases, bases_of(codes))
        return ActivationArray(
            codes.astype(np.float64) * scales.astype(np.float64).repeat(GROUP, 1), codes, scales, MOST[form][0]
        )

    # --- weights

    def pack(self, matrix: Matrix, order: Sequence[int] | None = None, bias: np.ndarray | None = None) -> Any:
        """`order` and `bias` are in the order of a checkpoint's rows; -1 is a row of zeros, which is also the
        padding."""
        rows = list(range(matrix.num_rows) if order is None else order)
        rows += [-1] * (-len(rows) % PANEL)
        format, form = native.FORMATS[matrix.format], form_of(matrix.format)
        packed = native.PackedMatrix(format, form, len(rows), matrix.num_columns, None, None)
        reference = ctypes.byref(packed)
        panels = self.memory(self.library.panel_bytes(reference) * len(rows) // PANEL)
        packed.panels = panels.ctypes.data
        row_bytes = matrix.data.stride(0) * matrix.data.element_size()
        positions = np.array(rows, np.int32)
        addresses = np.array([matrix.data.data_ptr() + row * row_bytes if row >= 0 else 0 for row in rows], np.uint64)
        self.library.pack(self.thread_pool.handle, reference, packed.panels, addresses.ctypes.data)
        if bias is not None:
            padded = np.append(bias, 0).astype(np.float32)[positions]
            packed.bias = self.floats(padded).ctypes.data
        self._kept.append(packed)
        return reference

    def products(self, *parts: tuple[Any, native.NativeRows]) -> Any:
        """An array of packed matrices and the activations that they are multiplied with."""
        array = (native.NativeProduct * len(parts))(
            *(native.NativeProduct(packed._obj, rows) for packed, rows in parts)
        )
        return self.kept(array)

    # --- steps

    def fill(
        self,
        entries: Sequence[tuple[int, int]],
        ids: np.ndarray | None = None,
        tables: np.ndarray | None = None,
        samples: Sequence[bool] | None = None,
        key_ends: np.ndarray | None = None,
    ) -> None:
        """Set the step: (start, count) of each entry, and the blocks of each, [entries, blocks]."""
        starts, counts = (np.array([entry[i] for entry in entries], np.int32) for i in (0, 1))
        if ids is None:
            ids = np.zeros(counts.sum(), np.int32)
        if tables is None:
            tables = np.zeros((len(entries), self.inputs.block_tables.shape[1]), np.int32)
        samples = [True] * len(entries) if samples is None else samples
        self.inputs.fill(ids, starts, counts, tables, np.array(samples, np.uint8), key_ends=key_ends)

    def tokens(self, num: int) -> None:
        """A step of this many tokens of arbitrary rows."""
        self.fill([(0, 1)] * num)

    def run(self) -> int:
        """Compute the step. Returns its status."""
        inputs = self.inputs
        status = self.library.program_run(self.program, inputs.num_tokens, inputs.num_rows, inputs.num_samples)
        for guard in self._guarded:
            assert (guard == CANARY).all(), "wrote beyond its memory"
        return int(status)


@contextmanager
def recording(library: ctypes.CDLL, *, is_causal: bool = True, **sizes: int) -> Iterator[Recording]:
    made = Recording(library, is_causal=is_causal, **sizes)
    try:
        yield made
    finally:
        made.close()


def form_of(format: Format) -> ActivationForm:
    if ACTIVATIONS == "blocks":
        return native.form_for(format, "int12", in_blocks=True)
    return native.form_for(format, ACTIVATIONS)


def assert_near(actual: np.ndarray, expected: np.ndarray, error: np.ndarray | float) -> None:
    """Every number is finite and within its own bound."""
    assert actual.shape == expected.shape
    off = np.abs(actual - expected) - error
    assert np.isfinite(actual).all()
    worst = np.unravel_index(off.argmax(), off.shape)
    assert (off <= 0).all(), f"{actual[worst]} at {worst}, not {expected[worst]}: beyond the bound by {off[worst]}"


def assert_rounded_to_bf16(actual: np.ndarray, expected: np.ndarray, error: np.ndarray | float) -> None:
    """Every number is the bfloat16 rounding of some number within the bound."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    assert (to_bf16(expected - error) <= actual).all() and (actual <= to_bf16(expected + error)).all()


def assert_kept(recorded: Recording, actual: np.ndarray, expected: np.ndarray, error: np.ndarray | float) -> None:
    """Plain activations are the expected values, rounded as for this instruction set."""
    if recorded.wide:
        assert_near(actual, expected, error + EPS * np.abs(expected))
    else:
        assert_rounded_to_bf16(actual, expected, error)


def assert_groups(kept: ActivationArray, expected: np.ndarray, error: np.ndarray | float) -> None:
    """The codes match some values within the bound."""
    error = np.broadcast_to(error, expected.shape)
    groups = (len(expected), -1, GROUP)
    code = kept.largest
    most = error.reshape(groups).max(-1)
    assert_near(kept.scales, np.abs(expected).reshape(groups).max(-1) / code, most / code + 2 * EPS * kept.scales)
    # Half a code, the error of the value, and the rounding of value, inverse and scale in the largest code.
    bound = kept.scales.repeat(GROUP, 1) * (0.5 + 4 * code * EPS) + error
    assert_near(kept.values, expected, bound)


def sampled_tables(seed: int, lengths: Sequence[int], num_blocks: int) -> np.ndarray:
    """Block tables for rows with these numbers of tokens, [rows, most]: each block once, in random order, then
    zeros."""
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = np.random.default_rng(seed).permutation(num_blocks)
    assert sum(needed) <= num_blocks
    tables = np.zeros((len(lengths), max(needed)), np.int32)
    for i, num in enumerate(needed):
        tables[i, :num] = blocks[sum(needed[:i]) :][:num]
    return tables
