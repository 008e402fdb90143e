"""An EAGLE head on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from pipeline import torch_needed
from pipeline.config.settings import Settings
from pipeline.kernels.sampling.logprob_inputs import FloatArray, ScoreInputs
from pipeline.kernels.sampling.sampling_inputs import SamplingInputs
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, StepInputs
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model import model_folder
from pipeline.runtime.model.kv_groups import undivided
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.backend import Library, library_of_draft, make_program
from pipeline.stages.execute.cpu.program import Program, ProgramPlan
from pipeline.stages.execute.drafts.eagle import MAX_PENDING, EagleProposer
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.program import AnyMatrix, Head, Norm
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.weights import DTYPES, FLOAT_FORMATS, Weights, converted

PIECE = 128
"""Positions that are computed together, beyond one for each row."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that the head belongs to."""

    config: ModelConfig
    weights: Weights
    program: Program
    library: Library | None


class EagleHead(EagleProposer[FloatArray]):
    """`kv` is the plan of the model's KV cache."""

    def __init__(
        self, settings: Settings, table: RowTable, kv: KVPlan, num_threads: int, folder: Path, target: Target
    ) -> None:
        """Raises UserError if the head can't run here."""
        self._hold = model_folder.hold(folder)
        model = target.config
        config = msgspec.structs.replace(
            ModelConfig.load(folder), logit_scale=model.logit_scale, logit_softcap=model.logit_softcap
        )
        hidden, vocab_size = model.hidden_size, model.vocab_size
        super().__init__(table, min(kv.max_model_len, config.max_position), PIECE)
        max_num_seqs = settings.schedule.max_num_seqs
        library = library_of_draft(settings, config, target.library)
        weights = Weights(folder, config, FLOAT_FORMATS[settings.execute.dtype], keeps_floats=library is not None)
        self._embedding = self._embedding_of(weights, target)
        self._fc = _floats(weights.matrix("fc.weight", hidden, self.num_states * hidden)).T.copy()
        self._bias = np.asarray(weights.vector("fc.bias", hidden)) if weights.has("fc.bias") else None
        last_norm = target.program.last_norm
        assert last_norm is not None
        self._norm, self._eps, self._centers = last_norm, model.rms_norm_eps, model.norm == "layer"
        self._room = PIECE + MAX_PENDING * max_num_seqs
        self._inputs = StepInputs(self._room, max_num_seqs, -(-kv.max_model_len // BLOCK_SIZE))
        own_vocab = msgspec.structs.replace(config, vocab_size=self._num_ids(config, vocab_size))
        self._sampling_inputs = SamplingInputs(max_num_seqs, own_vocab.vocab_size)
        own = replace(kv, max_model_len=self._max_len, layout=undivided(config.num_layers))
        plan = ProgramPlan(
            settings=settings,
            config=own_vocab,
            inputs=self._inputs,
            sampling_inputs=self._sampling_inputs,
            scores=ScoreInputs(max_num_seqs),
            kv=own,
            num_threads=num_threads,
        )
        self._program = make_program(library, plan)
        self._program.embed(None)
        self._emit(own_vocab, weights, target)
        self._program.finish_loading()

    num_states = 2
    """Vectors of hidden_size that `fc` reads."""

    def _num_ids(self, config: ModelConfig, vocab_size: int) -> int:
        """Ids that the head may propose, of the model's `vocab_size`."""
        return vocab_size

    def _embedding_of(self, weights: Weights, target: Target) -> AnyMatrix:
        model = target.config
        return target.weights.matrix("model.embed_tokens.weight", model.vocab_size, model.hidden_size)

    def _emit(self, config: ModelConfig, weights: Weights, target: Target) -> None:
        """Record the head's layers and the LM head, which is the model's."""
        model = target.config
        without_norm = msgspec.structs.replace(config, pre_norms=False)
        for layer in range(config.num_layers):
            self._program.attention(attention_weights(config if layer else without_norm, weights, layer))
            self._program.mlp(mlp_weights(config, weights, layer))
        matrix = (
            self._embedding
            if model.tie_embeddings
            else target.weights.matrix("lm_head.weight", model.vocab_size, model.hidden_size)
        )
        bias = target.weights.vector("lm_head.bias", model.vocab_size) if model.head_bias else None
        self._program.borrow_head(target.program)
        self._program.sample(Head(None, matrix, bias))

    def close(self) -> None:
        """Free threads and memory."""
        self._program.close()
        if self._hold is not None:
            self._hold.close()

    def _run(
        self, rows: IntArray, starts: IntArray, counts: IntArray, hidden: FloatArray, samples: BoolArray
    ) -> tuple[IntArray, FloatArray]:
        table, inputs = self._table, self._inputs
        repeated = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated] + starts[repeated]
        ids = table.ids[rows[repeated], positions + 1]
        num_blocks = int(table.num_blocks[rows].max())
        inputs.fill(ids, starts, counts, table.blocks[rows, :num_blocks], samples)
        self._write(_rows_of(self._embedding, ids), hidden)
        sampled = rows[samples]
        self._fill_sampling_inputs(sampled, (starts + counts + 1)[samples])
        drawn = self._program.run()
        last = (np.cumsum(counts) - 1)[samples]
        return self._ids_of(drawn), self._program.residual()[last].copy()

    def _write(self, embedded: FloatArray, hidden: FloatArray) -> None:
        """Write the input of the head's layers, made of the embeddings of ids and of hidden states, [positions, H]."""
        self._program.residual()[:] = self._fc_of(np.concatenate((embedded, hidden), axis=1))

    def _fc_of(self, states: FloatArray) -> FloatArray:
        x: FloatArray = states @ self._fc
        return x if self._bias is None else x + self._bias

    def _fill_sampling_inputs(self, rows: IntArray, positions: IntArray) -> None:
        """The id at position t + 2 is sampled with the noise key and the parameters of the row's own id there."""
        sampling = self._sampling_inputs
        self._table.fill_sampling_inputs(sampling, rows, positions)
        sampling.unmask(len(rows))
        sampling.logprobs.clear(len(rows))

    def _ids_of(self, drawn: IntArray) -> IntArray:
        """The model's ids of those that the head's program has sampled."""
        return drawn

    def _states_of(self, residual: FloatArray) -> FloatArray:
        return self._normed(residual)

    def _join(self, parts: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate(parts)

    def _take(self, states: FloatArray, which: BoolArray) -> FloatArray:
        return states[which]

    def _normed(self, residual: FloatArray) -> FloatArray:
        norm: Norm = self._norm
        wide = residual - residual.mean(-1, keepdims=True) if self._centers else residual
        factor = 1 / np.sqrt(np.square(wide).mean(-1, keepdims=True) + np.float32(self._eps))
        states: FloatArray = (wide * factor * np.asarray(norm.weight)).astype(np.float32)
        return states if norm.bias is None else states + np.asarray(norm.bias)


def _rows_of(matrix: object, ids: IntArray) -> FloatArray:
    """Rows of the embedding, float32."""
    if isinstance(matrix, StoredMatrix):
        return _floats(StoredMatrix(matrix.format, matrix.data[ids], len(ids), matrix.num_columns))
    torch_needed.require("an EAGLE head of this model")
    import torch

    from pipeline.kernels.matrix import as_matrix

    return _floats(as_matrix(matrix).take_rows(torch.from_numpy(ids.astype(np.int64))))  # type: ignore[arg-type]


def _floats(matrix: object) -> FloatArray:
    """A matrix in float32. Raises UserError for one in blocks without torch."""
    if isinstance(matrix, StoredMatrix) and matrix.format in DTYPES:
        return converted(matrix.data, DTYPES[matrix.format], "f32")
    torch_needed.require("an EAGLE head of a model with weights in blocks")
    import torch

    from pipeline.kernels.matrix import as_matrix

    floats: FloatArray = as_matrix(matrix).dequantize(torch.float32).numpy()  # type: ignore[arg-type]
    return floats
