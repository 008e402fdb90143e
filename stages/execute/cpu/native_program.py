"""A program in the CPU library: a step is one native call that runs without Python.

Weights are packed into panels when the program is recorded. Keys and values are stored in the order in which matmuls
read them (kernels/cpu/gemm.h and linear.h). The library has its own threads.
"""

import ctypes
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import Activations, Form, KVType
from pipeline.kernels.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import IntArray, StepInputs, block_bytes
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.panel_file import PanelPlace, PanelStore, key_of
from pipeline.stages.execute.cpu.program import (
    AnyMatrix,
    AnyVector,
    AttentionWeights,
    HeadNorms,
    Linear,
    LogitArray,
    MasksLate,
    MlpWeights,
    Program,
    SwapArray,
)
from pipeline.stages.execute.rope import rope_frequencies, rope_table

PAIR = 8
"""Half of a panel: the distance between outputs that rotate together, and between those of gate and up."""

MASKS_LATE = 1


def unsupported(config: ModelConfig) -> str | None:
    """Why the library can't compute a model of this shape, or None."""
    if config.head_dim > native.MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, above {native.MAX_HEAD_DIM}"
    if config.head_dim % native.PANEL:
        return f"head_dim is {config.head_dim}, not a multiple of {native.PANEL}"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "hidden_size and intermediate_size must be even"
    return None


class NativeProgram(Program):
    """Owns the packed weights, the KV memory and the thread pool."""

    def __init__(
        self,
        library: ctypes.CDLL,
        isa: str,
        num_threads: int,
        config: ModelConfig,
        inputs: StepInputs,
        sampling_inputs: SamplingInputs,
        scores: ScoreInputs,
        num_blocks: int,
        max_model_len: int,
        swap: SwapArray | None = None,
        activations: Activations = "int12",
        kv_type: KVType = KVType.BF16,
        panels: PanelPlace | None = None,
    ) -> None:
        """`activations` is the precision of activations for 4-bit weights. With `panels`, packed matrices of files are
        kept there."""
        assert unsupported(config) is None
        self.isa = isa
        self.name = f"cpu, {isa}"
        self._activations = activations
        self._library = library
        self._config = config
        self._inputs, self._sampling_inputs = inputs, sampling_inputs
        self._scores = scores
        self._scoring: int | None = None
        self._thread_pool = native.ThreadPool(library, num_threads)
        self._panels = None if panels is None else PanelStore(library, self._thread_pool, panels)
        self._kept: list[Any] = []
        self._table: tuple[AnyMatrix, native.PackedMatrix] | None = None
        self._num_layers = 0
        self._ticket = native.MaskTicket(None, 0, 0)
        self._handle = library.program_new(self._thread_pool.handle, ctypes.byref(self._step_arrays()))
        max_num_tokens = inputs.max_num_tokens
        width = config.num_heads * config.head_dim
        self._residual = self._floats(max_num_tokens, config.hidden_size)
        self._queries = self._rows(max_num_tokens, width)
        self._normed: dict[Form, native.NativeRows] = {}
        self._attended = self._rows(max_num_tokens, width)
        self._gated = self._rows(max_num_tokens, config.intermediate_size)
        self._wide = self._floats(max_num_tokens, -(-max(width, config.intermediate_size) // PAIR) * PAIR)
        self._logits = self._floats(inputs.max_num_rows, config.vocab_size)
        self._cos, self._sin = self._angles(max_model_len)
        self._kv = [
            native.NativeLayerMemory(
                self._memory(num_blocks * layer_bytes(config, kv_type)), config.num_kv_heads, config.head_dim, kv_type
            )
            for _ in range(config.num_layers)
        ]
        self._swap = swap
        """Keeps the memory alive: the library has only its address."""
        self._blocks = self._block_places(num_blocks, layer_bytes(config, kv_type))
        self._plans: dict[int, int] = {}

    def embed(self, table: AnyMatrix) -> None:
        self._table = table, self._pack((table,))
        self._library.program_embed(self._handle, self._residual, self._table[1])

    def attention(self, weights: AttentionWeights) -> None:
        config, library = self._config, self._library
        kv = ctypes.byref(self._kv[self._num_layers])
        self._num_layers += 1
        heads = config.num_heads + 2 * config.num_kv_heads
        order = _turning_order(config.num_heads + config.num_kv_heads, heads, config.head_dim)
        products = self._products(weights.norm, weights.qkv, order)
        norms = self._head_norms(weights.head_norms)
        library.program_qkv(
            self._handle, self._queries, products, len(products), config.num_heads, kv, self._cos, self._sin, norms
        )
        width = config.num_heads * config.head_dim
        rows, floats = self._written(self._attended, width, weights.out.matrices[0])
        library.program_attention(self._handle, rows, floats, self._queries, kv, self._plan(weights.window or 0))
        self._add(self._attended, width, weights.out)

    def mlp(self, weights: MlpWeights) -> None:
        inner = self._config.intermediate_size
        order = (
            _swiglu_order(inner) if _have_one_format(weights.gate_up.matrices) else np.arange(2 * inner, dtype=np.int32)
        )
        products = self._products(weights.norm, weights.gate_up, order)
        rows, floats = self._written(self._gated, inner, weights.down.matrices[0])
        self._library.program_swiglu(self._handle, rows, floats, products, len(products))
        self._add(self._gated, inner, weights.down)

    def sample(self, norm: AnyVector, head: AnyMatrix) -> None:
        self.last_norm = np.asarray(norm, np.float32)
        # A tied head shares the embedding's memory.
        tied = self._table is not None and self._table[0] is head
        packed = self._table[1] if self._table is not None and tied else self._pack((head,))
        places = packed, self._config.vocab_size, self._logits, self._inputs.max_num_rows
        form, weight = self._form(head), self._vector(norm)
        self._add_norm(self._handle, form, weight, sampled=True)
        self._library.program_sample(
            self._handle,
            self._normed_rows(form),
            *places,
            ctypes.byref(self._ticket),
            ctypes.byref(native.NativeSamplingArrays.of(self._sampling_inputs)),
        )
        # A second program with the same residual and head, for the logprobs of tokens that are not sampled.
        arrays = self._step_arrays()
        arrays.sampled = self._scores.places.ctypes.data
        self._scoring = self._library.program_new(self._thread_pool.handle, ctypes.byref(arrays))
        self._add_norm(self._scoring, form, weight, sampled=True)
        scores = native.NativeScoreArrays.of(self._scores)
        self._library.program_score(self._scoring, self._normed_rows(form), *places, ctypes.byref(scores))

    def finish_loading(self) -> None:
        if self._panels is not None:
            self._panels.save(self._kept)

    def run(self) -> IntArray:
        inputs = self._inputs
        status = self._library.program_run(self._handle, inputs.num_tokens, inputs.num_rows, inputs.num_samples)
        if status == MASKS_LATE:
            raise MasksLate(f"masks did not arrive within {self._ticket.timeout_ms} ms")
        return self._sampling_inputs.ids[: inputs.num_samples].copy()

    def score(self) -> None:
        self._library.program_run(self._scoring, self._inputs.num_tokens, 0, self._scores.num)

    def residual(self) -> FloatArray:
        size = self._inputs.num_tokens, self._config.hidden_size
        array: FloatArray = np.ctypeslib.as_array(ctypes.cast(self._residual, ctypes.POINTER(ctypes.c_float)), size)
        return array

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        assert sources.dtype == targets.dtype == np.int32 and sources.shape == targets.shape
        sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        self._library.copy_blocks(
            self._thread_pool.handle, ctypes.byref(self._blocks), sources.ctypes.data, targets.ctypes.data, len(sources)
        )

    def wait_for(self, word: int, expected: int, timeout_ms: int) -> None:
        self._ticket.expected, self._ticket.timeout_ms = expected, timeout_ms
        self._ticket.word = word or None

    def logits(self) -> LogitArray:
        num, width = self._inputs.num_samples, self._config.vocab_size
        array: LogitArray = np.ctypeslib.as_array(
            ctypes.cast(self._logits, ctypes.POINTER(ctypes.c_float)), (num, width)
        )
        return array

    def keep_logits(self) -> None:
        self._sampling_inputs.keeps_logits = True
        self._sampling_inputs.greedy[:] = 0

    def profile(self) -> list[tuple[str, float]]:
        """Compute the step in the inputs. Returns each op's name and seconds."""
        inputs, library = self._inputs, self._library
        seconds = np.zeros(library.program_size(self._handle), np.float64)
        library.program_profile(
            self._handle, inputs.num_tokens, inputs.num_rows, inputs.num_samples, seconds.ctypes.data
        )
        names = [library.program_name(self._handle, i).decode() for i in range(len(seconds))]
        return list(zip(names, seconds.tolist(), strict=True))

    def costs(self) -> list[tuple[float, float, bool]]:
        """For each op of the step in the inputs: bytes that it must move, operations, whether they are on integers."""
        inputs, library = self._inputs, self._library
        out = (ctypes.c_double * 3)()
        costs = []
        for i in range(library.program_size(self._handle)):
            library.program_cost(self._handle, i, inputs.num_tokens, inputs.num_rows, inputs.num_samples, out)
            costs.append((out[0], out[1], bool(out[2])))
        return costs

    def close(self) -> None:
        if self._handle:
            self._library.program_delete(self._handle)
            if self._scoring:
                self._library.program_delete(self._scoring)
            self._handle = self._scoring = None
            if self._panels is not None:
                self._panels.close()
            self._thread_pool.close()
            self._kept.clear()
            self._swap = None

    # The methods below lay out memory. Addresses are plain numbers; `_kept` keeps the memory alive.

    def _products(self, norm: AnyVector, linear: Linear, order: IntArray) -> Any:
        """Record the norm before a matmul with stacked matrices, and pack these: into one if they have one format, else
        each by itself. Output i is row order[i]; the order keeps the rows of each matrix together.

        Returns an array of products.
        """
        matrices = linear.matrices
        parts = (matrices,) if _have_one_format(matrices) else tuple((matrix,) for matrix in matrices)
        products = (native.NativeProduct * len(parts))()
        weight = self._vector(norm)
        written: set[Form] = set()
        begin, first_row = 0, 0
        for product, part in zip(products, parts, strict=True):
            form, num_rows = self._form(part[0]), sum(matrix.num_rows for matrix in part)
            if form not in written:
                self._add_norm(self._handle, form, weight)
                written.add(form)
            end = len(order) if part is parts[-1] else begin + num_rows
            rows = order[begin:end]
            bias = (
                None if linear.bias is None else np.asarray(linear.bias, np.float32)[first_row : first_row + num_rows]
            )
            packed = self._pack(part, np.where(rows < 0, rows, rows - first_row).astype(np.int32), bias)
            product.matrix, product.rows = packed, self._normed_rows(form)
            begin, first_row = end, first_row + num_rows
        return products

    def _form(self, matrix: AnyMatrix) -> Form:
        """The form of activations for a matmul with a matrix."""
        return native.form_for(matrix.format, self._activations)

    def _normed_rows(self, form: Form) -> native.NativeRows:
        """The output of norms in a form. Norms write several if the matrices after them need several."""
        if form not in self._normed:
            self._normed[form] = self._rows(self._inputs.max_num_tokens, self._config.hidden_size, form)
        return self._normed[form]

    def _add_norm(self, handle: int, form: Form, weight: int, sampled: bool = False) -> None:
        size, eps = self._config.hidden_size, self._config.rms_norm_eps
        rows = self._normed_rows(form)
        self._library.program_norm(handle, rows, form, self._residual, weight, size, eps, sampled)

    def _head_norms(self, norms: HeadNorms | None) -> Any:
        """The weights in the panels' order of a head's dimensions, or null."""
        if norms is None:
            return None
        order = _turning_order(1, 1, self._config.head_dim)
        query, key = (self._vector(np.asarray(weight)[order]) for weight in (norms.query, norms.key))
        return ctypes.byref(native.NativeHeadNorms(query, key, self._config.rms_norm_eps))

    def _plan(self, window: int) -> int:
        """The attention plan of all layers with this window (0 for none). It becomes an op before the first of them."""
        if window not in self._plans:
            config = self._config
            self._plans[window] = self._library.program_attention_plan(
                self._handle, config.num_heads, config.num_kv_heads, window
            )
        return self._plans[window]

    def _written(self, rows: native.NativeRows, width: int, matrix: AnyMatrix) -> tuple[native.NativeRows, bool]:
        """The output rows of an op before a matmul, and whether they are floats that are quantized afterwards."""
        if self._form(matrix) is Form.PLAIN:
            return rows, False
        return native.NativeRows(self._wide, width * 4), True

    def _add(self, rows: native.NativeRows, width: int, linear: Linear) -> None:
        (matrix,) = linear.matrices
        form = self._form(matrix)
        if form is not Form.PLAIN:
            self._library.program_quantize(self._handle, rows, form, self._wide, width)
        self._library.program_linear_add(
            self._handle, self._residual, rows, self._pack(linear.matrices, bias=linear.bias), self._config.hidden_size
        )

    def _step_arrays(self) -> native.NativeStepArrays:
        inputs = self._inputs
        names = ("ids", "positions", "slots", "sampled", "starts", "counts", "offsets", "block_tables")
        return native.NativeStepArrays(
            **{name: getattr(inputs, name).ctypes.data for name in names},
            max_blocks=inputs.block_tables.shape[1],
        )

    def _block_places(self, num_blocks: int, num_bytes: int) -> native.NativeBlocks:
        """The addresses of the blocks of all layers and of swap space."""
        layers = np.array([layer.data for layer in self._kv], np.uint64)
        self._kept.append(layers)
        return native.NativeBlocks(
            layers=layers.ctypes.data,
            swap=None if self._swap is None else self._swap.ctypes.data,
            num_layers=len(layers),
            num_blocks=num_blocks,
            layer_bytes=num_bytes,
        )

    def _memory(self, num_bytes: int) -> int:
        array = self._thread_pool.allocate(num_bytes)
        self._kept.append(array)
        return int(array.ctypes.data)

    def _floats(self, rows: int, width: int) -> int:
        return self._memory(rows * width * 4)

    def _rows(self, rows: int, width: int, form: Form | None = None) -> native.NativeRows:
        """Rows of activations, by default of any form."""
        stride = max(
            self._library.activation_bytes(any_form, width) for any_form in (Form if form is None else (form,))
        )
        return native.NativeRows(self._memory(self._library.activation_rows(rows) * stride), stride)

    def _vector(self, values: AnyVector) -> int:
        kept = np.ascontiguousarray(values, np.float32)
        self._kept.append(kept)
        return int(kept.ctypes.data)

    def _angles(self, max_model_len: int) -> tuple[int, int]:
        """Cosines and sines of every position: [max_model_len, head_dim / 2] each."""
        config = self._config
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cos, sin = rope_table(frequencies, max_model_len)
        return self._vector(cos), self._vector(sin)

    def _pack(
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
        stored, form = matrices[0].format, self._form(matrices[0])
        format = native.FORMATS[native.panel_format(stored)]
        packed = native.PackedMatrix(format, form, columns, matrices[0].num_columns, None, None)
        reference = ctypes.byref(packed)
        num_bytes = self._library.panel_bytes(reference) * columns // native.PANEL
        key = None
        if self._panels is not None:
            key = key_of(
                packed, [matrix.name if isinstance(matrix, StoredMatrix) else "" for matrix in matrices], order
            )
            packed.panels = None if key is None else self._panels.find(key, num_bytes)
        if packed.panels is None:
            packed.panels = panels = self._memory(num_bytes)
            if source := native.FLOAT_SOURCES.get(stored):
                self._library.pack_floats(self._thread_pool.handle, reference, panels, addresses.ctypes.data, source)
            else:
                self._library.pack(self._thread_pool.handle, reference, panels, addresses.ctypes.data)
            if self._panels is not None and key is not None:
                self._panels.add(key, panels, num_bytes)
        if bias is not None:
            packed.bias = self._vector(np.append(np.asarray(bias, np.float32), np.float32(0))[order])
        return packed


def _have_one_format(matrices: tuple[AnyMatrix, ...]) -> bool:
    return len({matrix.format for matrix in matrices}) == 1


def layer_bytes(config: ModelConfig, kv_type: KVType = KVType.BF16) -> int:
    """Bytes of a KV block in one layer."""
    return block_bytes(1, config.num_kv_heads, config.head_dim, 2 if kv_type is KVType.BF16 else 1)


def _turning_order(num_turning: int, num_heads: int, head_dim: int) -> IntArray:
    """Rows of queries, keys and values in the panels' order. In heads with rotary embedding, eight of the first half
    are followed by the eight of the second half that rotate with them."""
    half = np.arange(head_dim // 2).reshape(-1, 1, PAIR)
    turned = np.concatenate([half, half + head_dim // 2], axis=1).reshape(-1)
    plain = np.arange(head_dim)
    heads = [head * head_dim + (turned if head < num_turning else plain) for head in range(num_heads)]
    return np.concatenate(heads).astype(np.int32)


def _swiglu_order(inner: int) -> IntArray:
    """Rows of gate and up in the panels' order: eight of gate, then the corresponding eight of up."""
    padded = np.arange(-(-inner // PAIR) * PAIR)
    gate = np.where(padded < inner, padded, -1).reshape(-1, 1, PAIR)
    up = np.where(gate >= 0, gate + inner, -1)
    return np.concatenate([gate, up], axis=1).reshape(-1).astype(np.int32)
