"""An EAGLE-3 head (Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time
test", 2025): one layer that reads the model's hidden states of three depths.

    g[t]        fc(hidden states of position t before the low, the middle and the high layer)
    x[t]        norm(embedding of id t + 1), hidden_norm(g[t])      side by side: what attention reads, [2 H]
    f[t]        g[t] + attention(x[0] … x[t]), then + mlp(norm(…))
    ids         lm_head(norm(f[t])), of the head's own vocabulary, make the id at t + 2

After the last known g, the head's own f takes its place. Embedding and LM head are the head's; without an embedding,
it uses the model's. Noise belongs to the model's ids, so from a reduced vocabulary the likeliest ids are proposed, at
any temperature. The KV cache is that of `EagleHead`.
"""

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.drafts.eagle import EagleHead, Target
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.layers.norm import norm_weights
from pipeline.stages.execute.program import AnyMatrix, Head
from pipeline.stages.execute.weights import Weights


class Eagle3Head(EagleHead):
    """A `Proposer`."""

    num_states = 3

    def _num_ids(self, config: ModelConfig, vocab_size: int) -> int:
        assert config.eagle3 is not None
        return config.eagle3.draft_vocab_size

    def _embedding_of(self, weights: Weights, target: Target) -> AnyMatrix:
        model = target.config
        if weights.has("model.embed_tokens.weight"):
            return weights.matrix("model.embed_tokens.weight", model.vocab_size, model.hidden_size)
        return super()._embedding_of(weights, target)

    def _emit(self, config: ModelConfig, weights: Weights, target: Target) -> None:
        eagle3, hidden = config.eagle3, config.hidden_size
        assert eagle3 is not None
        self._normalizes_residual = eagle3.norm_before_residual
        self._own_eps = config.rms_norm_eps
        self._embedding_norm, self._hidden_norm = (
            np.asarray(weights.vector(f"model.layers.0.{name}.weight", hidden))
            for name in ("input_layernorm", "hidden_norm")
        )
        self._target_ids: IntArray | None = None
        """The model's id of each id of the reduced vocabulary."""
        if weights.has("d2t"):
            offsets = weights.integers("d2t", eagle3.draft_vocab_size)
            self._target_ids = (np.arange(eagle3.draft_vocab_size) + offsets).astype(np.int32)
        program = self._program
        program.attention_of_given(attention_weights(config, weights, 0, num_inputs=2 * hidden), 2 * hidden)
        program.mlp(mlp_weights(config, weights, 0))
        matrix = weights.matrix("lm_head.weight", config.vocab_size, hidden)
        program.sample(Head(norm_weights(config, weights, "model.norm"), matrix))

    def _states_of(self, residual: FloatArray) -> FloatArray:
        return self._fc_of(residual)

    def _write(self, embedded: FloatArray, hidden: FloatArray) -> None:
        normed = self._scaled(hidden, self._hidden_norm)
        given = np.concatenate((self._scaled(embedded, self._embedding_norm), normed), axis=1)
        self._program.given()[:] = given
        self._program.residual()[:] = normed if self._normalizes_residual else hidden

    def _scaled(self, states: FloatArray, weight: FloatArray) -> FloatArray:
        """RMS norm."""
        factor = 1 / np.sqrt(np.square(states).mean(-1, keepdims=True) + np.float32(self._own_eps))
        normed: FloatArray = (states * factor * weight).astype(np.float32)
        return normed

    def _fill_sampling_inputs(self, rows: IntArray, positions: IntArray) -> None:
        if self._target_ids is None:
            super()._fill_sampling_inputs(rows, positions)
            return
        sampling, num = self._sampling_inputs, len(rows)
        sampling.greedy[:num] = 1
        sampling.logits_processors[:num] = 0
        sampling.unmask(num)
        sampling.logprobs.clear(num)

    def _ids_of(self, drawn: IntArray) -> IntArray:
        if self._target_ids is None:
            return drawn
        ids: IntArray = np.where(drawn == NO_ID, NO_ID, self._target_ids[drawn]).astype(np.int32)
        return ids
