"""Inputs of each token for each layer in a torch program."""

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.select import Ops
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.pytorch.calls import TorchCalls
from pipeline.stages.execute.program import TokenInputs


class TorchTokenInputs:
    """Owns the inputs of all layers. The rows of a step's tokens are read in the file."""

    def __init__(self, ops: Ops, calls: TorchCalls, config: ModelConfig, weights: TokenInputs) -> None:
        inputs, table = config.per_layer_inputs, weights.table
        assert inputs is not None and isinstance(table, StoredMatrix)
        self._size, self._num_layers, self._hidden = inputs.size, config.num_layers, config.hidden_size
        self._table, self._norm, self._eps, self._ops = table, as_tensor(weights.norm), config.rms_norm_eps, ops
        self.projected = calls.buffer(self._num_layers * self._size)
        """[tokens, layers * size]; what `fill` makes the inputs of."""
        self.gates, self.gated = calls.buffer(self._size), calls.buffer(self._size)
        self._activation = config.activation

    def fill(self, projected: Tensor, ids: Tensor) -> None:
        """Make the inputs of the projections of the tokens' embeddings, in place."""
        table = self._table
        rows = table.data[ids.numpy()]
        part = StoredMatrix(table.format, rows, len(rows), table.num_columns)
        found = as_matrix(part).dequantize(torch.float32).view(-1, self._size)
        values = projected.view(-1, self._size)
        normed = torch.empty_like(values, dtype=torch.float32)
        # The mean square is that of projections that are not divided by sqrt(hidden_size) yet.
        self._ops.rms_norm(normed, values, self._norm, self._eps * self._hidden)
        values.copy_((normed + found * self._size**0.5) * 2**-0.5)

    def gate(self, gated: Tensor, gates: Tensor, inputs: Tensor, layer: int) -> None:
        """gated = activation(gates) * the inputs of a layer."""
        self._ops.activate(gated, gates, self._activation)
        gated.mul_(inputs[:, layer * self._size : (layer + 1) * self._size])
