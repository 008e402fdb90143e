"""The tensors of feed-forward layers, dense ones and mixtures of experts, and of norms, by Llama's names."""

from pipeline.runtime.model.model_config import EXPERTS, ModelConfig
from pipeline.stages.prepare.weights.recurrent_shapes import Linears, Shape


def norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    """The tensors of a norm of hidden states."""
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds} if config.norm_weights else {}


def mlp_linears(config: ModelConfig, layer: int) -> Linears:
    """The matrices of a layer's dense feed-forward layer."""
    return _gated_linears(config, "mlp.", config.inner_of(layer), config.mlp_bias, config.down_bias)


def mlp_vectors(config: ModelConfig, before: str) -> dict[str, Shape]:
    """The other tensors of a dense feed-forward layer."""
    parts: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return {f"{before}mlp.xielu.{name}": shape for name, shape in parts.items()} if config.activation == "xielu" else {}


def _gated_linears(
    config: ModelConfig, prefix: str, inner: int, has_bias: bool, down_bias: bool | None = None
) -> Linears:
    inputs = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    linears: Linears = {f"{prefix}{name}": (inner, config.hidden_size, has_bias) for name in inputs}
    return {**linears, f"{prefix}down_proj": (config.hidden_size, inner, has_bias if down_bias is None else down_bias)}


def expert_linears(config: ModelConfig) -> Linears:
    """The matrices of a mixture of experts."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    linears: Linears = {"mlp.router": (experts.num, hidden, experts.router_bias)}
    for number in range(experts.num):
        linears |= _gated_linears(config, f"{EXPERTS}{number}.", experts.intermediate_size, experts.bias)
    if inner := experts.shared_intermediate_size:
        linears |= _gated_linears(config, "mlp.shared_expert.", inner, False)
    if experts.shared_gate:
        linears["mlp.shared_expert_gate"] = (1, hidden, False)
    return linears


def expert_vectors(config: ModelConfig, before: str) -> dict[str, Shape]:
    """The other tensors of a mixture of experts."""
    experts = config.experts
    assert experts is not None
    shapes: dict[str, Shape] = {}
    if experts.selection_bias:
        shapes[f"{before}mlp.selection.bias"] = (experts.num,)
    if experts.factors:
        shapes[f"{before}mlp.expert_factors.weight"] = (experts.num,)
    norms = ["router_norm"] if experts.router_norm else []
    norms += ["experts_norm", "experts_post_norm", "dense_post_norm"] if experts.beside_dense else []
    for norm in norms:
        shapes |= norm_shapes(config, f"{before}mlp.{norm}")
    return shapes
