"""Inputs of each token for each layer in the CPU library: kernels/cpu/token_inputs.h.

embedding ─► matmul ─► inputs of all layers                            once
residual ─► matmul ─► activation, times inputs ─► matmul ─► norm ─► residual      in each layer
"""

import ctypes

from pipeline.errors import UserError
from pipeline.kernels.cpu import native
from pipeline.kernels.stored_matrix import BLOCK_COLUMNS, StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory, rows_of
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.program import PerLayerWeights, TokenInputs


class NativeTokenInputs:
    """Records the inputs of layers, and owns their memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: int,
        memory: NativeMemory,
        config: ModelConfig,
        max_num_tokens: int,
        norms: NativeNorms,
        layers: NativeLayers,
    ) -> None:
        inputs = config.per_layer_inputs
        assert inputs is not None
        self._library, self._program, self._memory, self._config = library, program, memory, config
        self._norms, self._layers, self._max_num_tokens = norms, layers, max_num_tokens
        self._size, self._width = inputs.size, config.num_layers * inputs.size
        self._inputs = memory.floats(max_num_tokens, self._width)
        self._gates = memory.floats(max_num_tokens, self._size)
        self._gated: dict[native.ActivationForm, native.NativeRows] = {}

    def emit(self, weights: TokenInputs) -> None:
        """Record the inputs of all layers, of the residual. Raises UserError if the parts of the table's rows are not
        whole blocks."""
        library, table = self._library, weights.table
        assert isinstance(table, StoredMatrix)
        columns = BLOCK_COLUMNS.get(table.format, 1)
        if self._size % columns:
            raise UserError(
                f"the embeddings of each layer are {table.format} in blocks of {columns} columns, but a layer has "
                f"{self._size}: convert them to another format"
            )
        products = self._memory.products(weights.project, rows_of(range(self._width)), self._norms.rows)
        self._norms.emit_before(self._program, None, weights.project)
        library.program_products(self._program, self._inputs, products, len(products), self._width)
        rows = table.row_addresses()
        self._memory.keep((rows, table))
        file = native.NativeFileTable(
            native.FORMATS[native.panel_format(table.format)],
            native.FLOAT_SOURCES.get(table.format, 0),
            rows.ctypes.data,
            table.data.strides[0] // self._config.num_layers,
            self._size**0.5,
        )
        # The mean square is that of projections that are not divided by sqrt(hidden_size) yet.
        eps = self._config.rms_norm_eps * self._config.hidden_size
        norm = native.NativeNorm(native.NORM_KINDS["rms"], self._memory.vector(weights.norm), None, eps)
        library.program_token_inputs(
            *(self._program, self._inputs, ctypes.byref(file), ctypes.byref(norm), self._size, self._config.num_layers)
        )

    def emit_layer(self, weights: PerLayerWeights) -> None:
        """Record how the inputs of the layer that was recorded last are added."""
        library, size, matrix = self._library, self._size, weights.out.matrices[0]
        self._norms.emit_before(self._program, None, weights.gate)
        products = self._memory.products(weights.gate, rows_of(range(size)), self._norms.rows)
        library.program_products(self._program, self._gates, products, len(products), size)
        form = self._memory.form(matrix)
        if form not in self._gated:
            self._gated[form] = self._memory.rows(self._max_num_tokens, size, form)
        rows, inputs = self._gated[form], self._inputs + 4 * self._layers.last * size
        activation = native.ACTIVATIONS[self._config.activation]
        library.program_gate_inputs(self._program, rows, form, self._gates, inputs, size, self._width, activation)
        self._layers.add(
            *(rows, size, weights.out, weights.post_norm, (), "inputs"), is_written=True, scale=weights.residual_scale
        )
