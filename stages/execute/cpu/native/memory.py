"""The memory of a program in the CPU library: activations, vectors, and weights packed into panels.

Addresses are plain numbers. The memory lives until `free`.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.cpu.native import ActivationForm, Activations
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.stages.execute.cpu.native.panel_file import PanelStore, key_of
from pipeline.stages.execute.program import AnyMatrix, AnyVector, Linear

PAIR = 8
"""Half of a panel: the distance between outputs that rotate together, and between those of gate and up."""


class NativeMemory:
    """`activations` is the precision of activations for weights of 4 to 6 bits. With `panels`, packed matrices of files
    are kept there."""

    def __init__(
        self,
        library: ctypes.CDLL,
        thread_pool: native_library.ThreadPool,
        activations: Activations,
        panels: PanelStore | None = None,
    ) -> None:
        self._library, self._thread_pool, self._activations = library, thread_pool, activations
        self._panels = panels
        self.kept: list[Any] = []
        """What lives until `free`."""

    def keep(self, array: Any) -> None:
        """Keep an array alive."""
        self.kept.append(array)

    def free(self) -> None:
        self.kept.clear()

    def form(self, matrix: AnyMatrix) -> ActivationForm:
        """The form of activations for a matmul with a matrix."""
        return native.form_for(matrix.format, self._activations, in_blocks=bool(self._library.prefers_blocks()))

    def allocate(self, num_bytes: int, *, touched_bytes: int | None = None) -> int:
        array = self._thread_pool.allocate(num_bytes, touched_bytes=touched_bytes)
        self.kept.append(array)
        return int(array.ctypes.data)

    def buffer(self, num_bytes: int) -> native.ByteArray:
        """Memory that lives as long as the array."""
        return self._thread_pool.allocate(num_bytes)

    def floats(self, rows: int, width: int) -> int:
        return self.allocate(rows * width * 4)

    def rows(self, rows: int, width: int, form: ActivationForm | None = None) -> native.NativeRows:
        """Rows of activations, by default of any form."""
        stride = max(
            self._library.activation_bytes(any_form, width)
            for any_form in (ActivationForm if form is None else (form,))
        )
        return native.NativeRows(self.allocate(self._library.activation_rows(rows) * stride), stride)

    def vector(self, values: AnyVector) -> int:
        kept = np.ascontiguousarray(values, np.float32)
        self.kept.append(kept)
        return int(kept.ctypes.data)

    def pack(
        self, matrices: tuple[AnyMatrix, ...], order: IntArray | None = None, bias: "AnyVector | None" = None
    ) -> native.PackedMatrix:
        """Stacked matrices of one format in panels: output i is row order[i], or zeros if that is negative."""
        rows = np.concatenate([matrix.row_addresses() for matrix in matrices])
        if order is None:
            order = np.arange(len(rows), dtype=np.int32)
        columns = -(-len(order) // native.PANEL) * native.PANEL
        order = np.concatenate([order, np.full(columns - len(order), -1, np.int32)])
        # Index -1 selects the null address after the last row.
        addresses = np.append(rows, np.uint64(0))[order]
        stored, form = matrices[0].format, self.form(matrices[0])
        format = native.FORMATS[native.panel_format(stored)]
        packed = native.PackedMatrix(format, form, columns, matrices[0].num_columns, None, None)
        reference = ctypes.byref(packed)
        num_bytes = self._library.panel_bytes(reference) * columns // native.PANEL
        key = None
        if self._panels is not None:
            names = [matrix.name if isinstance(matrix, StoredMatrix) else "" for matrix in matrices]
            key = key_of(packed, names, order)
            packed.panels = None if key is None else self._panels.find(key, num_bytes)
        if packed.panels is None:
            packed.panels = panels = self.allocate(num_bytes, touched_bytes=0)  # packing writes all of it
            if source := native.FLOAT_SOURCES.get(stored):
                self._library.pack_floats(self._thread_pool.handle, reference, panels, addresses.ctypes.data, source)
            else:
                self._library.pack(self._thread_pool.handle, reference, panels, addresses.ctypes.data)
            if self._panels is not None and key is not None:
                self._panels.add(key, panels, num_bytes)
        if bias is not None:
            packed.bias = self.vector(np.append(np.asarray(bias, np.float32), np.float32(0))[order])
        return packed

    def products(self, linear: Linear, order: IntArray, inputs: Callable[[ActivationForm], native.NativeRows]) -> Any:
        """Pack stacked matrices: into one if they have one format, else each by itself. Output i is row order[i]; the
        order keeps the rows of each matrix together, and may leave some out. `inputs` are the activations in a form.

        Returns an array of products.
        """
        matrices = linear.matrices
        parts = (matrices,) if have_one_format(matrices) else tuple((matrix,) for matrix in matrices)
        products = (native.NativeProduct * len(parts))()
        begin, first_row = 0, 0
        for product, part in zip(products, parts, strict=True):
            form, num_rows = self.form(part[0]), sum(matrix.num_rows for matrix in part)
            end = len(order) if part is parts[-1] else int(np.count_nonzero(order < first_row + num_rows))
            rows = order[begin:end]
            bias = (
                None if linear.bias is None else np.asarray(linear.bias, np.float32)[first_row : first_row + num_rows]
            )
            packed = self.pack(part, np.where(rows < 0, rows, rows - first_row).astype(np.int32), bias)
            product.matrix, product.rows = packed, inputs(form)
            begin, first_row = end, first_row + num_rows
        return products


def have_one_format(matrices: tuple[AnyMatrix, ...]) -> bool:
    return len({matrix.format for matrix in matrices}) == 1


def rows_of(part: range) -> IntArray:
    """The rows of a share."""
    return np.arange(part.start, part.stop, dtype=np.int32)


def turning_order(num_turning: int, heads: Iterable[int], head_dim: int) -> IntArray:
    """Rows of these heads of queries, keys and values in the panels' order. In heads with rotary embedding, which are
    the first ones of all, eight of the first half are followed by the eight of the second half that rotate with
    them."""
    half = np.arange(head_dim // 2).reshape(-1, 1, PAIR)
    turned = np.concatenate([half, half + head_dim // 2], axis=1).reshape(-1)
    plain = np.arange(head_dim)
    rows = [head * head_dim + (turned if head < num_turning else plain) for head in heads]
    return np.concatenate(rows).astype(np.int32)


def swiglu_order(inner: int, part: range | None = None) -> IntArray:
    """Rows of gate and up in the panels' order: eight of gate, then the corresponding eight of up. `part` are the
    outputs of each that are wanted, by default all."""
    part = range(inner) if part is None else part
    padded = np.arange(part.start, part.start + -(-len(part) // PAIR) * PAIR)
    gate = np.where(padded < part.stop, padded, -1).reshape(-1, 1, PAIR)
    up = np.where(gate >= 0, gate + inner, -1)
    return np.concatenate([gate, up], axis=1).reshape(-1).astype(np.int32)


def floats_at(address: int, rows: int, width: int) -> FloatArray:
    """float32 [rows, width] in the memory of a program."""
    array: FloatArray = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (rows, width))
    return array


def step_arrays(inputs: StepInputs) -> native.NativeStepArrays:
    """The addresses of a step's inputs."""
    names = ("ids", "slots", "sampled", "starts", "counts", "offsets", "block_tables")
    return native.NativeStepArrays(
        **{name: getattr(inputs, name).ctypes.data for name in names},
        positions=inputs.angle_rows.ctypes.data,
        max_blocks=inputs.block_tables.shape[1],
        adapters=inputs.adapters.ctypes.data,
        num_adapted=inputs.num_adapted.ctypes.data,
        key_ends=None if inputs.key_ends is None else inputs.key_ends.ctypes.data,
    )
