"""What a model needs from a back end beyond Llama's ops, and which back ends have it.

torch has everything. Features that are only another order of rows or other angles (partial and interleaved rotary
embedding, layers without it, YaRN, LongRoPE, stacked and transposed tensors) are none: they end when the weights are
loaded.
"""

from enum import Enum

from pipeline.runtime.model.model_config import ModelConfig


class Feature(Enum):
    """Values are for messages."""

    LAYER_NORM = "layer norms"
    QK_LAYER_NORM = "layer norms of queries and keys"
    QK_NORM_ALL = "a norm of all heads of queries or keys together"
    NO_PRE_NORM = "layers without a norm before them"
    RESIDUAL_NORM = "norms of the residual after each sum"
    POST_NORM = "norms after attention and the feed-forward layer"
    PARALLEL = "parallel attention and feed-forward layers"
    ACTIVATION = "an activation other than SiLU"
    PLAIN_MLP = "a feed-forward layer without a gate"
    EMBEDDING_NORM = "a norm of embeddings"
    EMBEDDING_SCALE = "a factor of embeddings"
    POSITIONS = "learned positions"
    TOKEN_TYPES = "token types"
    RESIDUAL_MULTIPLIER = "a factor of each layer's result"
    QUERY_SCALE = "a factor of attention scores"
    QUERY_GROWTH = "a factor of queries that depends on the position"
    ATTENTION_SOFTCAP = "capped attention scores"
    ALIBI = "ALiBi"
    DISTANCE_BIASES = "biases of attention scores by distance"
    SINKS = "attention sinks"
    EXPERTS = "mixtures of experts"
    EXPERT_BIAS = "biases of experts"
    SIGMOID_ROUTER = "sigmoid scores of experts"
    SELECTION_BIAS = "a bias that chooses experts"
    EXPERT_GROUPS = "groups of experts"
    EXPERT_FACTORS = "factors of experts"
    ROUTER_SOFTCAP = "capped logits of experts"
    ROUTER_NORM = "a norm of the router's input"
    DENSE_BESIDE_EXPERTS = "a dense feed-forward layer beside experts"
    LOGIT_SCALE = "a factor of logits"
    LOGIT_SOFTCAP = "capped logits"
    HEAD_BIAS = "a bias of the LM head"
    NO_HEAD = "no LM head"
    DELTA_NET = "layers with a recurrent state"
    SHORT_CONV = "short convolutions"
    ATTENTION_GATE = "a gate of attention's result"
    GATE_KIND = "a gate of attention's heads, or softplus of it"
    XIELU = "the activation xIELU"
    POST_NORM_EPS = "an epsilon of the norms after each half of a layer"
    OTHER_HEADS = "layers with other heads"
    VALUE_NORM = "a norm of values"
    SHARED_KV = "layers that read the keys and values of others"
    INNER_SIZES = "feed-forward layers of different sizes"
    LAYER_SCALES = "a factor of the residual after each layer"
    PER_LAYER_INPUTS = "inputs of each layer"
    ROPES = "layers with different rotary embeddings"


def features_of(config: ModelConfig) -> set[Feature]:
    """The features that a model needs."""
    ropes = {config.rope_of(layer) for layer in range(config.num_layers)}
    needs = {
        Feature.LAYER_NORM: config.norm == "layer",
        Feature.QK_LAYER_NORM: config.qk_norm and config.norm == "layer",
        Feature.QK_NORM_ALL: config.qk_norm and config.qk_norm_kind == "all",
        Feature.NO_PRE_NORM: not config.pre_norms,
        Feature.RESIDUAL_NORM: config.residual_norms,
        Feature.POST_NORM: config.post_norms,
        Feature.PARALLEL: config.parallel,
        Feature.ACTIVATION: config.activation != "silu",
        Feature.PLAIN_MLP: not config.gated,
        Feature.EMBEDDING_NORM: config.embedding_norm,
        Feature.EMBEDDING_SCALE: config.embedding_scale != 1,
        Feature.POSITIONS: config.position_embeddings > 0,
        Feature.TOKEN_TYPES: config.type_rows is not None,
        Feature.RESIDUAL_MULTIPLIER: config.residual_multiplier != 1,
        Feature.QUERY_SCALE: config.query_scale not in (None, config.head_dim**-0.5),
        Feature.QUERY_GROWTH: config.query_growth != 0,
        Feature.ATTENTION_SOFTCAP: config.attention_softcap is not None,
        Feature.ALIBI: config.alibi_slopes is not None,
        Feature.DISTANCE_BIASES: config.distance_buckets > 0,
        Feature.SINKS: config.sinks,
        Feature.EXPERTS: config.experts is not None,
        Feature.EXPERT_BIAS: config.experts is not None and config.experts.bias,
        Feature.SELECTION_BIAS: config.experts is not None and config.experts.selection_bias,
        Feature.SIGMOID_ROUTER: config.experts is not None and config.experts.scoring == "sigmoid",
        Feature.EXPERT_GROUPS: config.experts is not None and config.experts.num_groups > 1,
        Feature.EXPERT_FACTORS: config.experts is not None and config.experts.factors,
        Feature.ROUTER_SOFTCAP: config.experts is not None and config.experts.softcap != 0,
        Feature.ROUTER_NORM: config.experts is not None and config.experts.router_norm,
        Feature.DENSE_BESIDE_EXPERTS: config.experts is not None and config.experts.beside_dense,
        Feature.LOGIT_SCALE: config.logit_scale != 1,
        Feature.LOGIT_SOFTCAP: config.logit_softcap is not None,
        Feature.HEAD_BIAS: config.head_bias,
        Feature.NO_HEAD: not (config.generates and config.causal),
        Feature.DELTA_NET: config.delta is not None,
        Feature.SHORT_CONV: config.short_conv is not None,
        Feature.ATTENTION_GATE: config.attention_gate,
        Feature.GATE_KIND: config.gate_per_head or config.gate_function != "sigmoid",
        Feature.XIELU: config.activation == "xielu",
        Feature.POST_NORM_EPS: config.post_norm_eps is not None,
        Feature.OTHER_HEADS: len(config.all_heads) > 1,
        Feature.VALUE_NORM: config.value_norm,
        Feature.SHARED_KV: config.first_shared_kv_layer is not None,
        Feature.INNER_SIZES: config.intermediate_sizes is not None,
        Feature.LAYER_SCALES: config.layer_scales,
        Feature.PER_LAYER_INPUTS: config.per_layer_inputs is not None,
        Feature.ROPES: len(ropes) > 1,
    }
    return {feature for feature, is_needed in needs.items() if is_needed}


NATIVE: frozenset[Feature] = frozenset(Feature)
"""Features of the native CPU program."""
TRITON: frozenset[Feature] = frozenset(Feature) - {
    Feature.DELTA_NET,
    Feature.SHORT_CONV,
    Feature.ATTENTION_GATE,
    Feature.GATE_KIND,
    Feature.XIELU,
    Feature.POST_NORM_EPS,
    Feature.RESIDUAL_NORM,
    Feature.TOKEN_TYPES,
    Feature.DISTANCE_BIASES,
    Feature.NO_HEAD,
    Feature.OTHER_HEADS,
    Feature.VALUE_NORM,
    Feature.SHARED_KV,
    Feature.EXPERT_FACTORS,
    Feature.ROUTER_SOFTCAP,
    Feature.ROUTER_NORM,
    Feature.DENSE_BESIDE_EXPERTS,
    Feature.INNER_SIZES,
    Feature.LAYER_SCALES,
    Feature.PER_LAYER_INPUTS,
}
"""Features of the GPU program."""


def missing(config: ModelConfig, available: frozenset[Feature]) -> str | None:
    """The features of a model that are not `available`, as words for a message; None if there are none."""
    lacking = features_of(config) - available
    return ", ".join(feature.value for feature in Feature if feature in lacking) or None


def backends_of(config: ModelConfig) -> list[str]:
    """The back ends that can compute a model: "native" and "torch" on a CPU, "triton" on a GPU."""
    available = {"native": NATIVE, "torch": frozenset(Feature), "triton": TRITON}
    return [name for name, features in available.items() if missing(config, features) is None]
