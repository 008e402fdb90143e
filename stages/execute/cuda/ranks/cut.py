"""Cuts a model for the ranks on GPUs: a `ProgramBuilder` that gives `DeviceModel` only a rank's part of each matrix.

    matrix              cut into                              results
    query, key, value   rows: heads                           the rank's own attention and KV cache
    o                   columns: the inputs from its heads    a part of the sum over the ranks
    gate, up            rows: intermediate                    the rank's own
    down                columns: intermediate                 a part of the sum over the ranks
    embedding, head     rows: vocabulary                      see link.py

Only rank 0 has the biases of o and down, and learned positions: sums have them once. Experts are cut like gate, up and
down, so each rank has a part of every expert; routers are whole. Columns are cut between groups that have a common
scale. Mapped files are not copied for that: a rank reads only the pages of its part.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.errors import UserError
from pipeline.kernels.matrix import Matrix, as_tensor
from pipeline.kernels.stored_matrix import BLOCK_BYTES, BLOCK_COLUMNS, StoredMatrix
from pipeline.kernels.triton.gemm.device_matrix import Quantization, group_of
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from pipeline.stages.execute.program import (
    AnyMatrix,
    AnyVector,
    AttentionWeights,
    Embedding,
    ExpertsWeights,
    Head,
    HeadNorms,
    Linear,
    MlpWeights,
    ProgramBuilder,
    RecurrentWeights,
)
from pipeline.stages.execute.ranks.share import PANEL, Share, cut

LARGEST_GROUP = 256
"""Columns of the largest block."""


def rank_config(config: ModelConfig, share: Share) -> ModelConfig:
    """The model that a rank computes: its heads, and the most that it may have of the intermediate sizes. Raises
    UserError if the model can't be cut."""
    if config.qk_norm and config.qk_norm_kind == "all":
        raise UserError(
            f"execute.tensor_parallel is {share.num_ranks}, but a GPU has not all heads then, and {config.name} "
            f"({config.architecture}) norms queries and keys of all heads together: leave it at 1"
        )
    if share.num_ranks * 16 > config.vocab_size:
        raise UserError(
            f"execute.tensor_parallel: {share.num_ranks} ranks, but the model has only {config.vocab_size} ids"
        )

    def most(size: int) -> int:
        parts = -(-size // LARGEST_GROUP)
        return min(size, -(-parts // share.num_ranks) * LARGEST_GROUP)

    experts = config.experts
    if experts is not None:
        shared = most(experts.shared_intermediate_size)
        sizes = {"intermediate_size": most(experts.intermediate_size), "shared_intermediate_size": shared}
        experts = msgspec.structs.replace(experts, **sizes)
    heads = slice(share.heads.start, share.heads.stop)
    slopes = config.alibi_slopes
    return msgspec.structs.replace(
        config,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        intermediate_size=most(config.intermediate_size),
        alibi_slopes=None if slopes is None else slopes[heads],
        experts=experts,
    )


class ShardBuilder(ProgramBuilder):
    """Passes a rank's part of a model on. `config` is the whole model's."""

    def __init__(
        self, model: DeviceModel, config: ModelConfig, share: Share, quantization: Quantization | None
    ) -> None:
        self._model, self._config, self._share, self._quantization = model, config, share, quantization
        self._table: tuple[AnyMatrix, AnyMatrix] | None = None
        """The embedding, whole and cut."""

    def embed(self, embedding: Embedding | None) -> None:
        assert embedding is not None
        table = _rows(embedding.table, self._share.vocab)
        self._table = embedding.table, table
        positions = embedding.positions if self._share.rank == 0 else None
        self._model.embed(Embedding(table, positions, embedding.norm))

    def attention(self, weights: AttentionWeights) -> None:
        self._model.attention(self._attention(weights))

    def recurrent(self, weights: RecurrentWeights) -> None:
        raise AssertionError("models with states are rejected before (models/features.py)")

    def mlp(self, weights: MlpWeights) -> None:
        self._model.mlp(self._mlp(weights))

    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        self._model.parallel(self._attention(attention), self._mlp(mlp))

    def experts(self, weights: ExpertsWeights) -> None:
        num_parts = 2 if self._config.gated else 1
        experts = self._config.experts
        assert experts is not None
        inner, group = self._inner(weights.down)
        gate_up = self._outputs(weights.gate_up, [inner] * (num_parts * experts.num))
        down = self._inputs(weights.down, inner, group)
        shared = None
        if weights.shared is not None:
            first, last = weights.shared
            inner, group = self._inner(last)
            shared = self._outputs(first, [inner] * num_parts), self._inputs(last, inner, group)
        self._model.experts(
            ExpertsWeights(
                weights.norm, weights.router, gate_up, down, weights.selection_bias, shared, weights.post_norm
            )
        )

    def sample(self, head: Head) -> None:
        assert self._table is not None
        whole, own = self._table
        matrix = own if head.matrix is whole else _rows(head.matrix, self._share.vocab)
        # The bias is added to all logits, on rank 0.
        self._model.sample(Head(head.norm, matrix, head.bias))

    def _attention(self, weights: AttentionWeights) -> AttentionWeights:
        share, head_dim = self._share, self._config.head_dim
        queries, keys = (
            range(heads.start * head_dim, heads.stop * head_dim) for heads in (share.heads, share.kv_heads)
        )
        norms = weights.head_norms
        if norms is not None and norms.key is not None and self._config.qk_norm_kind != "head":
            norms = HeadNorms(norms.query[queries.start : queries.stop], norms.key[keys.start : keys.stop])
        return AttentionWeights(
            norm=weights.norm,
            qkv=self._outputs(weights.qkv, [queries, keys, keys]),
            out=self._inputs(weights.out, queries, self._group(weights.out.matrices[0])),
            heads=weights.heads,
            head_norms=norms,
            window=weights.window,
            rope=weights.rope,
            sinks=None if weights.sinks is None else weights.sinks[share.heads.start : share.heads.stop],
            post_norm=weights.post_norm,
        )

    def _mlp(self, weights: MlpWeights) -> MlpWeights:
        inner, group = self._inner(weights.down)
        return MlpWeights(
            norm=weights.norm,
            gate_up=self._outputs(weights.gate_up, [inner] * len(weights.gate_up.matrices)),
            down=self._inputs(weights.down, inner, group),
            post_norm=weights.post_norm,
        )

    def _group(self, matrix: AnyMatrix) -> int:
        """Columns with a common scale, which can't be cut; 1 for floats."""
        if matrix.format in BLOCK_COLUMNS:
            return BLOCK_COLUMNS[matrix.format]
        return 1 if self._quantization is None else group_of(matrix.num_columns)

    def _inner(self, down: Linear) -> tuple[range, int]:
        """The rank's columns of `down`, which are its rows of gate and up, and the columns of a group."""
        first, share = down.matrices[0], self._share
        group = max(PANEL, *(self._group(matrix) for matrix in down.matrices))
        inner = cut(first.num_columns, group, share.rank, share.num_ranks)
        if first.num_columns <= (share.num_ranks - 1) * group:
            raise UserError(
                f"execute.tensor_parallel: {share.num_ranks} ranks, but the {first.num_columns} columns of the "
                f"feed-forward layers' second matrix are {-(-first.num_columns // group)} groups of {group} that can't "
                "be cut: choose fewer ranks"
            )
        return inner, self._group(first)

    def _outputs(self, linear: Linear, parts: Sequence[range]) -> Linear:
        """A range of the rows of each matrix."""
        matrices = tuple(_rows(matrix, part) for matrix, part in zip(linear.matrices, parts, strict=True))
        if linear.bias is None:
            return Linear(matrices)
        begin, biases = 0, []
        for matrix, part in zip(linear.matrices, parts, strict=True):
            biases.append(linear.bias[begin + part.start : begin + part.stop])
            begin += matrix.num_rows
        return Linear(matrices, _joined(biases))

    def _inputs(self, linear: Linear, columns: range, group: int) -> Linear:
        """A range of the columns of each matrix."""
        if columns.start % group or (columns.stop % group and columns.stop != linear.matrices[0].num_columns):
            at = columns.start if columns.start % group else columns.stop
            raise UserError(
                f"execute.tensor_parallel: {self._share.num_ranks} ranks would cut weights at column {at}, within a "
                f"group of {group} columns with a common scale: choose fewer ranks, or weights without quantization"
            )
        matrices = tuple(_columns(matrix, columns) for matrix in linear.matrices)
        bias = linear.bias if self._share.rank == 0 else None
        kept = group if self._quantization is not None and matrices[0].format not in BLOCK_COLUMNS else 0
        return Linear(matrices, bias, group=kept)


def _rows(matrix: AnyMatrix, part: range) -> AnyMatrix:
    """A view of rows."""
    rows = slice(part.start, part.stop)
    if isinstance(matrix, StoredMatrix):
        return StoredMatrix(matrix.format, matrix.data[rows], len(part), matrix.num_columns)
    return Matrix(matrix.format, matrix.data[rows], len(part), matrix.num_columns)


def _columns(matrix: AnyMatrix, part: range) -> AnyMatrix:
    """A copy of columns, which are whole blocks."""
    begin, end = part.start, part.stop
    if matrix.format in BLOCK_COLUMNS:
        columns, size = BLOCK_COLUMNS[matrix.format], BLOCK_BYTES[matrix.format]
        begin, end = begin // columns * size, end // columns * size
    if isinstance(matrix, StoredMatrix):
        data = np.ascontiguousarray(matrix.data[:, begin:end])
        return StoredMatrix(matrix.format, data, matrix.num_rows, len(part))
    return Matrix(matrix.format, matrix.data[:, begin:end].contiguous(), matrix.num_rows, len(part))


def _joined(vectors: list[AnyVector]) -> AnyVector:
    import torch

    return torch.cat([as_tensor(vector) for vector in vectors])
