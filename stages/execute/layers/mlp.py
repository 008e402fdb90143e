"""The gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

from dataclasses import dataclass

from torch import Tensor

from pipeline.kernels.select import Ops
from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.program import Buffer, Program
from pipeline.stages.execute.weights import Weights


@dataclass(frozen=True, slots=True)
class MlpBuffers:
    """Memory that the feed-forward layers of a model share."""

    gate_up: Buffer
    gated: Buffer


class Mlp:
    """Gate and up by one product, then the product with down."""

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up_weight = weights.join([f"{name}.weight" for name in names], [inner, inner], hidden)
        self.down_weight = weights.take(f"{prefix}.down_proj.weight", hidden, inner)
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        if config.mlp_bias:
            self.gate_up_bias = weights.join([f"{name}.bias" for name in names], [inner, inner])
            self.down_bias = weights.take(f"{prefix}.down_proj.bias", hidden)

    def record(self, program: Program, ops: Ops, buffers: MlpBuffers, x: Buffer, out: Buffer) -> None:
        """From `x` into `out`, which may be the same memory."""
        program.call(ops.linear, buffers.gate_up, x, self.gate_up_weight, self.gate_up_bias)
        program.call(ops.silu_mul, buffers.gated, buffers.gate_up)
        program.call(ops.linear, out, buffers.gated, self.down_weight, self.down_bias)
