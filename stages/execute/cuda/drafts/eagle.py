"""An EAGLE head on a GPU, over the rows of the model: its steps read their ids, blocks and sampling parameters.

    a step        the model's hidden states ──copy──► kept until the step is collected
    collected     of the ids that are kept ──► pending; many are computed at once, without waiting
    propose       pending ──► head, sample ──ids──► host ──► head, sample ──ids──► host …

A token of the head at position t has the id at t + 1 (`id_shift`). The head's own state of each pass stays on the GPU
for the next one. The formulas are those of stages/execute/drafts/eagle.py and cpu/drafts/eagle3.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.settings import Settings
from pipeline.kernels.matrix import as_matrix
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton import norm
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.norm import NormWeights
from pipeline.kernels.triton.rows import StepArrays
from pipeline.runtime.model import model_folder
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.available import require_features
from pipeline.stages.execute.cuda.device import Device
from pipeline.stages.execute.cuda.drafts.draft_steps import DraftSteps
from pipeline.stages.execute.cuda.launched_step import ProposerStates
from pipeline.stages.execute.cuda.model.device_model import DeviceModel, HiddenStates
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.drafts.draft_model import captured_layers, prepared_draft
from pipeline.stages.execute.drafts.eagle import MAX_PENDING, EagleProposer
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.layers.norm import norm_weights
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.rows import BoolArray, RowTable
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights

PIECE = 512
"""Positions of a row that are computed together."""


class HeadModel(DeviceModel):
    """The head's layers, and the LM head. Without `eagle3`, that is the model's; the embedding is the model's unless
    the head has one."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        weights: Weights,
        target: DeviceModel,
        target_config: ModelConfig,
    ) -> None:
        """`sizes` are the most tokens and rows of a step. Raises UserError if a tensor is missing."""
        self._eagle3, hidden = config.eagle3, config.hidden_size
        num_ids = config.vocab_size if self._eagle3 is None else self._eagle3.draft_vocab_size
        super().__init__(device, msgspec.structs.replace(config, vocab_size=num_ids), dtype, *sizes)
        self._is_fusible = False
        self._positions = self._embedding_norm = self._head_bias = None
        self._target, self._target_eps, where = target, float(target_config.rms_norm_eps), device.where
        self._fc = self._matrix(weights, "fc.weight", hidden, (2 if self._eagle3 is None else 3) * hidden)
        self._fc_bias = self._vector(weights.vector("fc.bias", hidden)).to(dtype) if weights.has("fc.bias") else None
        self._x = torch.zeros(sizes[0], 2 * hidden, dtype=dtype, device=where)
        self.hidden = torch.zeros(sizes[0], hidden, dtype=torch.float32, device=where)
        """[max_num_tokens, H]: what a step reads besides its ids; written before it."""
        self.target_ids: Tensor | None = None
        """The model's id of each id of a reduced vocabulary, [draft_vocab_size] int64."""
        if self._eagle3 is None:
            self._emit(config, weights, target)
        else:
            self._emit_eagle3(config, weights, target)
        self._states: Tensor | None = None

    def _emit(self, config: ModelConfig, weights: Weights, target: DeviceModel) -> None:
        without_norm = msgspec.structs.replace(config, pre_norms=False)
        for layer in range(config.num_layers):
            self.attention(attention_weights(config if layer else without_norm, weights, layer))
            self.mlp(mlp_weights(config, weights, layer))
        self._table, self._head = target.table, target.head
        self._norm, self._head_bias = None, target.head_bias

    def _emit_eagle3(self, config: ModelConfig, weights: Weights, target: DeviceModel) -> None:
        hidden, vocab_size, where = config.hidden_size, config.vocab_size, self._device.where
        self._norms = tuple(
            NormWeights(self._vector(weights.vector(f"model.layers.0.{name}.weight", hidden)))
            for name in ("input_layernorm", "hidden_norm")
        )
        assert self._eagle3 is not None
        num_ids = self._eagle3.draft_vocab_size
        if weights.has("d2t"):
            target_ids = np.arange(num_ids) + weights.integers("d2t", num_ids)
            self.target_ids = torch.from_numpy(target_ids.astype(np.int64)).to(where)
        self.attention(attention_weights(config, weights, 0, num_inputs=2 * hidden))
        self.mlp(mlp_weights(config, weights, 0))
        self._given = self._x
        self._table = target.table
        if weights.has("model.embed_tokens.weight"):
            embedding = weights.matrix("model.embed_tokens.weight", vocab_size, hidden)
            self._table = DeviceMatrix.of((as_matrix(embedding),), self._dtype, where)
        matrix = weights.matrix("lm_head.weight", num_ids, hidden)
        self._head = DeviceMatrix.of((as_matrix(matrix),), self._dtype, where)
        self._norm = self._norm_weights(norm_weights(config, weights, "model.norm"))

    def _matrix(self, weights: Weights, name: str, num_rows: int, num_columns: int) -> Tensor:
        matrix = as_matrix(weights.matrix(name, num_rows, num_columns))
        return matrix.dequantize(torch.float32).to(self._device.where, self._dtype)

    def states_of(self, hidden_states: HiddenStates, num_tokens: int) -> Tensor:
        """What the head gets of the model's last step, in new memory: [num_tokens, H] float32."""
        if self._eagle3 is not None:
            return self._fc_of(self._target.captured[:num_tokens])
        states = torch.empty_like(hidden_states.residual[:num_tokens])
        index = torch.arange(num_tokens, dtype=torch.int32, device=states.device)
        partials = hidden_states.split_k_partials
        norm.take_norm(states, hidden_states.residual, partials, index, self._target.norm, self._target_eps)
        return states

    def likeliest(self, num: int) -> Tensor:
        """The model's ids of the largest of `num` samples' logits, with a reduced vocabulary: [num] int64."""
        assert self.target_ids is not None
        return self.target_ids[self.logits[:num].argmax(-1)]

    def _fc_of(self, states: Tensor) -> Tensor:
        return functional.linear(states.to(self._dtype), self._fc, self._fc_bias).float()

    def _embed(self, step: StepArrays) -> None:
        """Write the input of the layers: made of the embeddings of ids and of `hidden`."""
        num, width = step.num_tokens, self._config.hidden_size
        residual, hidden, x = self._residuals[0][:num], self.hidden[:num], self._x[:num]
        norm.embed(residual, self._table, step.ids)
        if self._eagle3 is None:
            x[:, :width].copy_(residual)
            x[:, width:].copy_(hidden)
            residual.copy_(functional.linear(x, self._fc, self._fc_bias))
            return
        eps, normed = float(self._config.rms_norm_eps), self._normed[:num]
        for index, (states, weights) in enumerate(zip((residual, hidden), self._norms, strict=True)):
            norm.add_norm(normed, states, None, weights, eps)
            x[:, index * width : (index + 1) * width].copy_(normed)
        residual.copy_(normed if self._eagle3.norm_before_residual else hidden)


class HeadWeights:
    """The weights of the head on the device, and the memory of its steps. They are there before the KV memory is
    planned."""

    @classmethod
    def of(
        cls, settings: Settings, device: Device, target: DeviceModel, target_config: ModelConfig
    ) -> "HeadWeights | None":
        """The head that prepare has left; None without one. Lets `target` keep the hidden states that it reads."""
        if settings.speculative.method != "eagle":
            return None
        if layers := captured_layers(settings):
            target.capture(layers)
        return cls(settings, prepared_draft(settings), device, target, target_config)

    def __init__(
        self, settings: Settings, folder: Path, device: Device, target: DeviceModel, target_config: ModelConfig
    ) -> None:
        """Raises UserError if the head can't run here."""
        self.hold = model_folder.hold(folder)
        loaded = ModelConfig.load(folder)
        require_features(loaded)
        if loaded.eagle3 is None:  # the LM head is the model's
            scale, cap = target_config.logit_scale, target_config.logit_softcap
            loaded = msgspec.structs.replace(loaded, logit_scale=scale, logit_softcap=cap)
        self.config = loaded
        max_num_seqs = settings.schedule.max_num_seqs
        self.max_num_tokens = PIECE + MAX_PENDING * max_num_seqs
        dtype: torch.dtype = getattr(torch, settings.execute.dtype)
        weights = Weights(folder, loaded, FLOAT_FORMATS[settings.execute.dtype])
        sizes = self.max_num_tokens, max_num_seqs
        self.model = HeadModel(device, loaded, dtype, sizes, weights, target, target_config)


class DeviceEagleHead(EagleProposer[Tensor]):
    """`kv` is the plan of the model's KV cache, and `flush` applies the row changes that have not been sent."""

    def __init__(
        self,
        settings: Settings,
        weights: HeadWeights,
        device: Device,
        table: RowTable,
        rows: DeviceRows,
        kv: KVPlan,
        flush: Callable[[], None],
    ) -> None:
        self.steps = DraftSteps(
            settings, device, weights.config, weights.model, table, rows, kv, weights.max_num_tokens, id_shift=1
        )
        super().__init__(table, self.steps.max_len, PIECE)
        self._hold, self._flush = weights.hold, flush
        self._device, self._model = device, weights.model

    def states_of(self, hidden_states: HiddenStates, num_tokens: int) -> Tensor:
        """What `observe` gets of the model's last step; see `HeadModel.states_of`."""
        return self._model.states_of(hidden_states, num_tokens)

    def observe_step(self, entries: ProposerStates, sampled: Sampled) -> None:
        """Let the head see the hidden states of what a step has computed and is kept. `sampled` is its result."""
        counts = entries.counts.copy()
        if len(sampled.num_ids):
            counts[entries.samples] += sampled.num_ids - 1
        table, rows = self._table, entries.rows
        is_current = table.taken[rows] & (table.generations[rows] == entries.generations)
        starts, offsets = entries.starts[is_current], entries.offsets[is_current]
        self.observe(rows[is_current], starts, counts[is_current], offsets, entries.states)

    def close(self) -> None:
        """Free the folder; the device's memory goes with the process."""
        if self._hold is not None:
            self._hold.close()

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        self._flush()
        return super().propose(rows, most, clock)

    def _states_of(self, residual: Tensor) -> Tensor:
        return residual

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def _take(self, states: Tensor, which: BoolArray) -> Tensor:
        if which.all():
            return states.clone()
        return states.index_select(0, self._device.send(np.flatnonzero(which)))

    def _run(
        self, rows: IntArray, starts: IntArray, counts: IntArray, hidden: Tensor, samples: BoolArray
    ) -> tuple[IntArray, Tensor]:
        self._model.hidden[: len(hidden)].copy_(hidden)
        if not samples.any():
            self._flush()  # `propose` has done so; a step's changes may be many, if it waits for the steps before it
            self.steps.release(self.steps.launch(rows, starts, counts, samples, is_forward_only=True))
            return np.zeros(0, np.int32), hidden[:0]
        step = self.steps.launch(rows, starts, counts, samples, is_forward_only=self._model.target_ids is not None)
        states = self.steps.hidden_states(step).of(0, len(hidden))
        if len(hidden) > len(rows):
            states = states.index_select(0, self._device.send(step.batch.sampled.astype(np.int64)))
        if self._model.target_ids is None:
            return self.steps.ids_of(step), states
        # Noise belongs to the model's ids, so the likeliest ones are proposed.
        ids: IntArray = self._model.likeliest(len(step.batch.sampled)).to("cpu", torch.int32).numpy()
        self.steps.release(step)
        return ids, states
