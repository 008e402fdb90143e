"""The architectures of .gguf files: what their keys and tensors mean, where they differ from those of Llama.

Names of keys and tensors, and what llama.cpp's converter does to tensors, are those of `constants.py` in gguf-py and of
`conversion/` (formerly convert_hf_to_gguf.py) in https://github.com/ggml-org/llama.cpp.
"""

from collections.abc import Callable
from typing import Any

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Rope
from pipeline.stages.prepare.families.alibi import mpt_slopes
from pipeline.stages.prepare.families.architecture import LAYER_NORM, alibi_slopes
from pipeline.stages.prepare.gguf import encoders, gemma4
from pipeline.stages.prepare.gguf.architecture import LAYER_EPS, GgufArchitecture, GgufKeys, experts_of
from pipeline.stages.prepare.gguf.recurrent import delta_net, short_conv
from pipeline.stages.prepare.gguf.ropes import LINEAR, YARN, read_scaling


def windows(model: ModelConfig, keys: GgufKeys, every: int, default: int | None = None) -> dict[str, Any]:
    """All layers but each `every`-th have the file's window, unless it names others. `default` is the window of files
    that have no key for it."""
    size = keys.metadata.get(f"{keys.architecture}.attention.sliding_window", int, default)
    layers = keys.windowed_layers(every)
    if not size or not layers:
        return {}
    return {"sliding_window": size, "sliding_layers": None if len(layers) == model.num_layers else layers}


def _experts(*, normalized: bool) -> Callable[[GgufKeys, ModelConfig], dict[str, Any]]:
    return lambda keys, model: {"experts": experts_of(keys, model, normalized=normalized)}


def _glm4_moe(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    experts = experts_of(keys, model, normalized=False, reads_router=True)
    return {"experts": experts, "qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors}


def _llama(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """Mixtral's files have the same architecture."""
    experts = experts_of(keys, model, normalized=True)
    return {} if experts is None else {"experts": experts, "architecture": "mixtral"}


def _gpt_oss(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    scaling = read_scaling(keys.metadata, keys.architecture, model.max_position, refused=(LINEAR,), truncate=False)
    return {
        "experts": experts_of(keys, model, normalized=True),
        **windows(model, keys, 2),
        "rope_scaling": scaling,
    }


def _gemma(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {"embedding_scale": model.hidden_size**0.5}


def _gemma2(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {
        **_gemma(keys, model),
        **windows(model, keys, 2, 4096),  # as in llama.cpp, whose first files have no key
        # Files have no scale of queries. The largest model has another one, as in llama.cpp.
        "query_scale": _gemma_scale(model, 46),
        "attention_softcap": keys.number("attn_logit_softcapping", 50.0),
        "logit_softcap": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {
        **_gemma(keys, model),
        **windows(model, keys, 6),
        "query_scale": _gemma_scale(model, 62),
        "logit_softcap": keys.number("final_logit_softcapping"),
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_scaling": read_scaling(keys.metadata, keys.architecture, model.max_position, refused=(YARN,)),
        "sliding_rope": Rope(keys.number("rope.freq_base_swa", 1e4) or 1e4),
    }


def _gemma_embedding(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """The file's window is that of both sides (LLAMA_SWA_TYPE_SYMMETRIC)."""
    found = _gemma3(keys, model)
    if "sliding_window" in found:
        found["sliding_window"] = found["sliding_window"] // 2 + 1
    return {**found, "query_scale": model.head_dim**-0.5, "logit_softcap": None}


def _gemma_scale(model: ModelConfig, largest: int) -> float:
    by_hidden = model.num_layers == largest
    return float((model.hidden_size // model.num_heads if by_hidden else model.head_dim) ** -0.5)


def _granite(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    what = "a model without rotary embedding"
    keys.metadata.refuse_unless(f"{keys.architecture}.rope.scaling.finetuned", True, what)
    return {
        "embedding_scale": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "query_scale": keys.number("attention.scale"),
        "logit_scale": 1 / (keys.number("logit_scale", 1.0) or 1.0),
    }


def _smollm3(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """llama.cpp leaves rotary embedding out of each fourth layer."""
    return {"layers_without_rope": [i for i in range(model.num_layers) if (i + 1) % 4 == 0]}


def _cohere(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in keys.tensors
    return {"logit_scale": keys.number("logit_scale", 1.0), "qk_norm": has_norms}


def _cohere2(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    found = windows(model, keys, 4)
    with_window = found.get("sliding_layers") or list(range(model.num_layers))
    full = [i for i in range(model.num_layers) if not found or i not in with_window]
    return {**found, "logit_scale": keys.number("logit_scale", 1.0), "layers_without_rope": full}


def _exaone4(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """Files name the layers with a window. Those without the list have three in four in the largest model, as in
    llama.cpp. If there are windows, the other layers have no rotary embedding."""
    size, is_largest = keys.count("attention.sliding_window"), model.num_layers == 64
    layers = keys.windowed_layers(4 if is_largest else None)
    if is_largest:
        size = size or 4096
    if layers is None:
        what = "a sliding window in layers that the file doesn't name"
        keys.metadata.refuse_unless(f"{keys.architecture}.attention.sliding_window", 0, what)
    if not size or not layers:
        return {}
    others = [i for i in range(model.num_layers) if i not in layers]
    return {"sliding_window": size, "sliding_layers": layers, "layers_without_rope": others}


def _olmo(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    keys.metadata.refuse_unless("olmo.attention.clamp_kqv", 0.0, "clipping queries, keys and values")
    return {}


def _olmo2(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """Files with a window are those of OLMo 3. Layers with the window have a rotary embedding without scaling, as in
    llama.cpp. Its program does not use `rope.freq_base_swa`, so another base than the file's is refused."""
    if not (found := windows(model, keys, 4)):
        return {}
    scaled = model.rope_scaling is not None
    return {**found, "architecture": "olmo3", "sliding_rope": Rope(model.rope_theta) if scaled else None}


def _parallel(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {"parallel": keys.flag("use_parallel_residual", True)}


def _stablelm(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    parallel = "blk.0.ffn_norm.weight" not in keys.tensors
    return {"parallel": parallel, "shared_norm": parallel}


def _falcon(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {"shared_norm": "blk.0.attn_norm_2.weight" not in keys.tensors}


def _positions(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {"position_embeddings": model.max_position}


def _bloom(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {"alibi_slopes": alibi_slopes(model.num_heads)}


def _mpt(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    keys.metadata.refuse_unless("mpt.attention.clamp_kqv", 0.0, "clipping queries, keys and values")
    largest = keys.number("attention.max_alibi_bias", 8.0)
    if largest is None or largest < 1 or largest != int(largest):
        keys.metadata.refuse_unless("mpt.attention.max_alibi_bias", 8.0, "attention without ALiBi, or with this one,")
    return {"alibi_slopes": mpt_slopes(model.num_heads, int(largest or 8))}


GEMMA = {"activation": "gelu_tanh"}
POST = {"post_norms": True}
PLAIN = {**LAYER_NORM, "gated": False}

GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        models="Llama, Mistral, Mixtral, SmolLM2",
        interleaved_rope=True,
        has_windows=True,
        read=_llama,
        reads_experts=True,
    ),
    "qwen2": GgufArchitecture(models="Qwen2, Qwen2.5"),
    "qwen3": GgufArchitecture(models="Qwen3", always={"qk_norm": True}),
    "gemma": GgufArchitecture(models="Gemma", always=GEMMA, read=_gemma),
    "gemma2": GgufArchitecture(models="Gemma 2", always={**GEMMA, **POST}, read=_gemma2, reads_windows=True),
    "gemma3": GgufArchitecture(
        models="Gemma 3",
        model_type="gemma3_text",
        always={**GEMMA, **POST, "qk_norm": True},
        read=_gemma3,
        reads_windows=True,
        reads_scaling=True,
    ),
    "phi2": GgufArchitecture(
        models="Phi-2",
        model_type="phi",
        eps=LAYER_EPS,
        always={**PLAIN, "activation": "gelu_tanh", "parallel": True, "shared_norm": True},
    ),
    "phi3": GgufArchitecture(models="Phi-3, Phi-4", has_windows=True),
    "chatglm": GgufArchitecture(models="GLM-4-9B", model_type="glm", always={"interleaved_rope": True}),
    "glm4": GgufArchitecture(models="GLM-4-0414", always={**POST, "interleaved_rope": True}),
    "olmo": GgufArchitecture(
        models="OLMo",
        interleaved_rope=True,
        eps=LAYER_EPS,
        always={"norm": "layer", "norm_weights": False},
        read=_olmo,
    ),
    "olmo2": GgufArchitecture(
        models="OLMo 2 and 3",
        always={**POST, "pre_norms": False, "qk_norm": True, "qk_norm_kind": "all"},
        read=_olmo2,
        reads_windows=True,
    ),
    "exaone4": GgufArchitecture(
        models="EXAONE 4",
        always={**POST, "pre_norms": False, "qk_norm": True},
        read=_exaone4,
        reads_windows=True,
    ),
    "ernie4_5": GgufArchitecture(models="ERNIE 4.5", always={"interleaved_rope": True}),
    "apertus": GgufArchitecture(models="Apertus", always={"activation": "xielu", "gated": False, "qk_norm": True}),
    "arcee": GgufArchitecture(
        models="AFM (Arcee)", interleaved_rope=True, always={"gated": False, "activation": "relu2"}
    ),
    "smollm3": GgufArchitecture(models="SmolLM3", interleaved_rope=True, read=_smollm3),
    "granite": GgufArchitecture(models="Granite 3", interleaved_rope=True, read=_granite),
    "seed_oss": GgufArchitecture(models="Seed-OSS", names={"post_attention_layernorm": "post_attention_norm"}),
    "command-r": GgufArchitecture(
        models="Command R",
        model_type="cohere",
        eps=LAYER_EPS,
        always={
            "norm": "layer",
            "parallel": True,
            "shared_norm": True,
            "interleaved_rope": True,
            "qk_norm_kind": "each_head",
        },
        read=_cohere,
    ),
    "cohere2": GgufArchitecture(
        models="Command R7B, Command A",
        eps=LAYER_EPS,
        always={"norm": "layer", "parallel": True, "shared_norm": True, "interleaved_rope": True},
        read=_cohere2,
        reads_windows=True,
    ),
    "starcoder2": GgufArchitecture(models="StarCoder 2", eps=LAYER_EPS, always={**PLAIN, "activation": "gelu_tanh"}),
    "stablelm": GgufArchitecture(models="StableLM", eps=LAYER_EPS, always=LAYER_NORM, read=_stablelm),
    "nemotron": GgufArchitecture(models="Nemotron-4, Minitron", eps=LAYER_EPS, always={**PLAIN, "activation": "relu2"}),
    "gptneox": GgufArchitecture(
        models="GPT-NeoX, Pythia",
        model_type="gpt_neox",
        eps=LAYER_EPS,
        always={**PLAIN, "activation": "gelu"},
        read=_parallel,
    ),
    "gpt2": GgufArchitecture(
        models="GPT-2", eps=LAYER_EPS, always={**PLAIN, "activation": "gelu_tanh", "rotary_dim": 0}, read=_positions
    ),
    "starcoder": GgufArchitecture(
        models="StarCoder, SantaCoder",
        model_type="gpt_bigcode",
        eps=LAYER_EPS,
        always={**PLAIN, "activation": "gelu_tanh", "rotary_dim": 0},
        read=_positions,
    ),
    "falcon": GgufArchitecture(
        models="Falcon 1 and 2",
        eps=LAYER_EPS,
        always={**PLAIN, "activation": "gelu", "parallel": True},
        read=_falcon,
    ),
    "bloom": GgufArchitecture(
        models="BLOOM",
        eps=LAYER_EPS,
        always={**PLAIN, "activation": "gelu_tanh", "embedding_norm": True, "rotary_dim": 0},
        read=_bloom,
    ),
    "qwen2moe": GgufArchitecture(
        models="Qwen1.5-MoE, Qwen2-MoE", model_type="qwen2_moe", read=_experts(normalized=False), reads_experts=True
    ),
    "qwen3moe": GgufArchitecture(
        models="Qwen3-MoE",
        model_type="qwen3_moe",
        always={"qk_norm": True},
        read=_experts(normalized=True),
        reads_experts=True,
    ),
    "olmoe": GgufArchitecture(
        models="OLMoE",
        always={"qk_norm": True, "qk_norm_kind": "all"},
        read=_experts(normalized=False),
        reads_experts=True,
    ),
    "gpt-oss": GgufArchitecture(
        models="gpt-oss",
        model_type="gpt_oss",
        always={"activation": "swiglu_oai", "sinks": True},
        read=_gpt_oss,
        reads_windows=True,
        reads_experts=True,
        reads_scaling=True,
        names={"post_attention_layernorm": "post_attention_norm"},
    ),
    "glm4moe": GgufArchitecture(
        models="GLM-4.5, 4.6, 4.7",
        model_type="glm4_moe",
        read=_glm4_moe,
        reads_experts=True,
        has_drafts=True,
        names={"post_attention_layernorm": "post_attention_norm"},
    ),
    "ernie4_5-moe": GgufArchitecture(
        models="ERNIE 4.5 MoE",
        model_type="ernie4_5_moe",
        always={"interleaved_rope": True},
        read=_experts(normalized=True),
        reads_experts=True,
    ),
    "mpt": GgufArchitecture(
        models="MPT",
        eps=LAYER_EPS,
        always={"norm": "layer", "gated": False, "activation": "gelu", "rotary_dim": 0},
        read=_mpt,
    ),
    **delta_net.ARCHITECTURES,
    **short_conv.ARCHITECTURES,
    **gemma4.ARCHITECTURES,
    **encoders.ARCHITECTURES,
    "gemma-embedding": GgufArchitecture(
        models="EmbeddingGemma",
        model_type="gemma3_text",
        always={**GEMMA, **POST, "qk_norm": True, "causal": False},
        read=_gemma_embedding,
        reads_windows=True,
        reads_scaling=True,
    ),
}
