"""The model of a .gguf file in transformers, for `check-model`. transformers' own loader knows few architectures, and
ignores tensors without a word.

The config is made of what prepare has read of the file's keys. `gguf_reference` has compared them, and that the config
says the same model. Tensors, their names and the order of their rows are read anew, with the gguf package,
as llama.cpp's converter (`conversion/` in https://github.com/ggml-org/llama.cpp) has written them.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import PoolingKind
from pipeline.runtime.model.rope import Llama3Rope, LongRope, ProportionalRope, Rope
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.prepare.architectures import architecture_of
from pipeline.stages.prepare.check_model.gguf_layers import scaling_keys, sizes_by_layer
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf import gemma4
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.gguf.ropes import ROPE_FREQUENCIES
from pipeline.stages.prepare.sources.source import ModelError

Array = np.ndarray[Any, Any]
ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config has instead."""
PERMUTED = ("llama", "olmo", "arcee", "smollm3", "granite")
"""Files in which rows of q and k are in the order of adjacent pairs (`LlamaModel.permute`)."""
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron")
"""Files whose norms have weights plus one."""
GROUPED = ("gptneox", "falcon", "bloom")
"""Files in which rows of all queries come before those of keys and values, and not those of one group."""
TRANSPOSED = ("gpt2",)
OWN_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""Tensors of a layer that the gguf package doesn't name, by their names in transformers."""
ONE_ROW = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Matrices of one row, which are vectors in files."""


def config_of(path: Path, ours: ModelConfig) -> Any:
    """The config of the model `ours` in transformers. Raises ModelError if transformers doesn't take it."""
    from transformers import AutoConfig

    kind = architecture_of(ours.architecture)
    values = {**_sizes(ours), **_windows(ours), **_ropes(ours), **_experts(ours), **_flags(ours), **_own(ours)}
    keys = {kind.keys.get(key, key): value for key, value in values.items()}
    try:
        return AutoConfig.for_model(ours.architecture, **keys)
    except Exception as error:  # transformers documents no exceptions
        words = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ModelError(f"{path}: transformers does not take the file's config: {words}") from error


def _sizes(ours: ModelConfig) -> dict[str, Any]:
    fills = ours.head_dim * ours.num_heads == ours.hidden_size
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
        "max_position_embeddings": ours.position_embeddings or ours.max_position,
        "rms_norm_eps": ours.rms_norm_eps,
        "tie_word_embeddings": ours.tie_embeddings,
        # Defaults would be ids of the architecture's own vocabulary.
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        **({} if fills and ours.architecture not in OWN_HEAD_DIM else {"head_dim": ours.head_dim}),
    }


OWN_HEAD_DIM = (
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "qwen3", "qwen3_moe", "glm", "glm4", "gpt_oss", "seed_oss"),
)
"""Architectures whose head_dim has a default of its own."""


HYBRID = ("exaone4", "cohere2", "olmo3")
"""Architectures whose layers have windows by default."""


def _windows(ours: ModelConfig) -> dict[str, Any]:
    if ours.sliding_window is not None and not ours.causal:  # transformers' is that of both sides
        ours = msgspec.structs.replace(ours, sliding_window=2 * (ours.sliding_window - 1))
    if ours.sliding_window is None:
        full = {"layer_types": ours.num_layers * ["full_attention"]} if ours.architecture in HYBRID else {}
        return {"sliding_window": None, **full} if ours.architecture in (*HYBRID, "starcoder2", "phi3") else {}
    windowed = range(ours.num_layers) if ours.sliding_layers is None else ours.sliding_layers
    kinds = ["sliding_attention" if i in windowed else "full_attention" for i in range(ours.num_layers)]
    return {"sliding_window": ours.sliding_window, "layer_types": kinds}


def _ropes(ours: ModelConfig) -> dict[str, Any]:
    share = {} if not ours.rotary_dim else {"partial_rotary_factor": ours.rotary_dim / ours.head_dim}
    if ours.rotary_dim == 0:
        return {}
    main = {"rope_theta": ours.rope_theta, **share, **scaling_keys(ours.rope_scaling)}
    long = ours.rope_scaling
    original = {"original_max_position_embeddings": long.original_max_position} if isinstance(long, LongRope) else {}
    if ours.sliding_rope is not None or ours.architecture == "olmo3":  # whose config always has both
        rope = ours.sliding_rope or Rope(ours.rope_theta, ours.rope_scaling)
        sliding = {"rope_theta": rope.theta, **scaling_keys(rope.scaling)}
        return {"rope_parameters": {"full_attention": main, "sliding_attention": sliding}}
    without = {}
    if ours.architecture == "smollm3":
        without = {"no_rope_layers": [int(i not in ours.layers_without_rope) for i in range(ours.num_layers)]}
    return {"rope_parameters": main, **original, **without}


def _experts(ours: ModelConfig) -> dict[str, Any]:
    if (experts := ours.experts) is None:
        return {}
    own_key = "intermediate_size" if ours.architecture in ("mixtral", "olmoe", "gpt_oss") else "moe_intermediate_size"
    shared = {"shared_expert_intermediate_size": experts.shared_intermediate_size} if experts.shared_gate else {}
    dense = [] if experts.layers is None else [i for i in range(ours.num_layers) if i not in experts.layers]
    return {
        "num_local_experts" if ours.architecture in ("mixtral", "gpt_oss") else "num_experts": experts.num,
        "num_experts_per_tok": experts.num_per_token,
        "norm_topk_prob": experts.normalized,
        own_key: experts.intermediate_size,
        **shared,
        **({"mlp_only_layers": dense} if dense else {}),
    }


def _placed_experts(ours: ModelConfig, experts: Experts) -> dict[str, Any]:
    """Keys of experts in the layers behind the first ones, beside shared experts of the same size."""
    layers = range(ours.num_layers) if experts.layers is None else experts.layers
    num_shared = experts.shared_intermediate_size // experts.intermediate_size
    if ours.architecture == "ernie4_5_moe":
        step = layers[1] - layers[0] if len(layers) > 1 else 1
        return {
            "moe_layer_start_index": layers[0],
            "moe_layer_end_index": layers[-1],
            "moe_layer_interval": step,
            "moe_num_shared_experts": num_shared,
        }
    return {
        "first_k_dense_replace": layers[0],
        "n_shared_experts": num_shared,
        "use_qk_norm": ours.qk_norm,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
    }


def _flags(ours: ModelConfig) -> dict[str, Any]:
    """Keys of biases. Configs without such a key keep it as one of no meaning."""
    return {
        "attention_bias": ours.qkv_bias,
        "mlp_bias": ours.mlp_bias,
        "use_bias": ours.qkv_bias,
        "use_qkv_bias": ours.qkv_bias,
        "attention_out_bias": ours.out_bias,
        "use_parallel_residual": ours.parallel,
    }


def _own(ours: ModelConfig) -> dict[str, Any]:
    """Keys of single architectures."""
    scale = ours.head_dim**-0.5 if ours.query_scale is None else ours.query_scale
    match ours.architecture:
        case "gemma2" | "gemma3_text":
            return {
                **({} if ours.causal else {"use_bidirectional_attention": True}),
                "query_pre_attn_scalar": round(scale**-2),
                "attn_logit_softcapping": ours.attention_softcap,
                "final_logit_softcapping": ours.logit_softcap,
            }
        case "gemma4_text":
            return sizes_by_layer(ours)
        case "glm4_moe" | "ernie4_5_moe" if ours.experts is not None:
            return _placed_experts(ours, ours.experts)
        case "granite":
            return {
                "embedding_multiplier": ours.embedding_scale,
                "residual_multiplier": ours.residual_multiplier,
                "attention_multiplier": scale,
                "logits_scaling": 1 / ours.logit_scale,
            }
        case "cohere":
            return {"logit_scale": ours.logit_scale, "use_qk_norm": ours.qk_norm}
        case "cohere2":
            return {"logit_scale": ours.logit_scale}
        case "falcon":
            large = not ours.shared_norm
            return {
                "new_decoder_architecture": large,
                "num_kv_heads": ours.num_kv_heads,
                "multi_query": ours.num_kv_heads == 1,
                "parallel_attn": ours.parallel,
                "num_ln_in_parallel_attn": 2 if large else None,
                "alibi": ours.alibi_slopes is not None,
                "bias": ours.qkv_bias,
            }
        case "gpt_bigcode":
            return {"multi_query": ours.num_kv_heads == 1}
        case "gpt_oss":
            return {"swiglu_limit": ours.swiglu_limit}
        case "stablelm":
            return {"qk_layernorm": ours.qk_norm}
        case "bert" | "nomic_bert":
            return {"type_vocab_size": ours.token_types, "pad_token_id": 0}
    return {}


def load(path: Path, parts: Sequence[Path], ours: ModelConfig) -> Any:
    """The model in float32, of the files `parts`; without a head if `ours` generates no text. Raises ModelError if a
    tensor is missing or left over."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    file = _Tensors(path, parts, ours)
    if (divisors := file.find(ROPE_FREQUENCIES)) is not None and isinstance(ours.rope_scaling, Llama3Rope):
        ours = msgspec.structs.replace(ours, rope_scaling=None)  # prepare has found it in these divisors
    config = config_of(path, ours)
    how = {"attn_implementation": "eager"} if ours.attention_softcap else {}
    if not ours.generates:
        model = AutoModel.from_config(config, dtype=torch.float32)
        stored = revert_weight_conversion(model, model.state_dict())  # by the names of files
        wanted = {name: tuple(old.shape) for name, old in stored.items() if not name.startswith("pooler.")}
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
        tied = set(model.all_tied_weights_keys) if ours.tie_embeddings else set()
        wanted = {name: tuple(old.shape) for name, old in model.state_dict().items() if name not in tied}
    made = {name: file.read(name, shape) for name, shape in wanted.items()}
    if left := file.left():
        raise ModelError(f"{path}: nothing in transformers' {ours.architecture} is named {shown(left[0])}")
    state = {name: torch.from_numpy(np.array(data, np.float32, order="C")) for name, data in made.items()}
    if not ours.generates:
        model = type(model).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    else:
        model.load_state_dict(state, strict=False)  # without what is tied
        model.tie_weights()
    if divisors is not None and not isinstance(ours.rope_scaling, ProportionalRope):
        for name in ("inv_freq", "original_inv_freq"):
            getattr(model.model.rotary_emb, name).div_(torch.from_numpy(divisors.copy()))
    return model.eval()


DENSE = ("dense_2.weight", "dense_3.weight")
"""Of an embedder, after the pooling."""
HEADS = (*DENSE, "cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias", "output.weight")
"""Tensors that the hidden states of a model that generates no text don't depend on."""


def pooling_of(parts: Sequence[Path], ours: ModelConfig) -> PoolingKind:
    """How llama.cpp pools the hidden states (`enum llama_pooling_type`)."""
    fields = gguf.GGUFReader(parts[0]).fields
    field = fields.get(f"{fields['general.architecture'].contents()}.pooling_type")
    kinds: dict[int, PoolingKind] = {0: "mean", 1: "mean", 2: "cls", 3: "last", 4: "last" if ours.causal else "cls"}
    return "mean" if field is None else kinds[int(field.contents())]


def head_of(path: Path, parts: Sequence[Path], ours: ModelConfig) -> list[tuple[Array, Array | None, str]]:
    """The layers after the pooling, as llama.cpp computes them: matrix, bias and activation."""
    file = _Tensors(path, parts, ours)
    if ours.pooler is None or ours.pooler.classifier is None:
        return [(found, None, "identity") for name in DENSE if (found := file.find(name)) is not None]
    layers: list[tuple[Array, Array | None, str]] = []
    if not ours.causal and (first := file.find("cls.weight")) is not None:
        layers.append((first, file.find("cls.bias"), "tanh"))
    if (rows := file.find("cls.output.weight")) is not None:
        rows = np.atleast_2d(rows)
        if ours.architecture == "qwen3" and len(rows) == 2:  # yes and no, of which the softmax is taken
            rows = rows[:1] - rows[1:]
        layers.append((rows, file.find("cls.output.bias"), "identity"))
    return layers


class _Tensors:
    """The tensors of a file by the names of transformers."""

    def __init__(self, path: Path, parts: Sequence[Path], ours: ModelConfig) -> None:
        readers = [gguf.GGUFReader(part) for part in parts]
        self._path, self._ours, self._fields = path, ours, readers[0].fields
        self._architecture: str = readers[0].fields["general.architecture"].contents()
        number = next(i for i, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = gguf.get_tensor_name_map(number, ours.num_layers)
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._used = {ROPE_FREQUENCIES, *ROPE_FACTORS, *(() if ours.generates else HEADS)}

    def left(self) -> list[str]:
        """Tensors that nothing has asked for."""
        tied = {"output.weight"} if self._ours.tie_embeddings else set()
        return sorted(name for name in self._tensors.keys() - self._used - tied if not self._is_unused(name))

    def _is_unused(self, name: str) -> bool:
        """Whether a tensor is of a layer that drafts (MTP), or of keys and values in a layer that reads those of
        another; prepare has reported both."""
        _, number, part = [*name.split(".", 2), "", ""][:3]
        if not name.startswith("blk.") or not number.isdecimal():
            return False
        layer = int(number)
        if layer >= self._ours.num_layers:
            return GGUF_ARCHITECTURES[self._architecture].has_drafts
        return part in gemma4.OWN_KV and self._ours.kv_source(layer) != layer

    def find(self, name: str) -> Array | None:
        """A tensor in float32, by its name in the file."""
        if (tensor := self._tensors.get(name)) is None:
            return None
        self._used.add(name)
        return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """A tensor by its name in transformers. Raises ModelError if it is missing, or has another shape."""
        stem, _, last = name.rpartition(".")
        if stem.endswith("mlp.act_fn"):
            return self._of_activation(int(name.split(".")[2]), last, shape)
        data = self._experts(stem, last) if stem.endswith("mlp.experts") else self._plain(name)
        if data.size == math.prod(shape) and (name.endswith(ONE_ROW) or "token_type" in name):
            data = data.reshape(shape)
        if data.shape != shape:
            raise ModelError(f"{self._path}: {shown(name)} has the shape {data.shape}; transformers has {shape}")
        return data

    def _of_activation(self, layer: int, part: str, shape: tuple[int, ...]) -> Array:
        """A parameter of xIELU, which is a key of the file: once, or for each layer."""
        values = np.atleast_1d(np.array(self._fields[f"xielu.{part}"].contents(), np.float32))
        return np.full(shape, values[min(layer, len(values) - 1)], np.float32)

    def _plain(self, name: str) -> Array:
        for found in self._candidates(name):
            if (data := self.find(found)) is not None:
                return self._converted(name, data)
        raise ModelError(f"{self._path}: no tensor is {shown(name)} of transformers' {self._ours.architecture}")

    def _candidates(self, name: str) -> Iterator[str]:
        *_, layer, part = ["", "", *name.split(".", 3)]
        if (own := OWN_NAMES.get(part)) is not None:
            yield f"blk.{layer}.{own}"
        # The bias by which experts are selected: files name it without what ERNIE 4.5 has between.
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("gate.moe_", "moe_")
        # BLOOM's tensors have no prefix on the hub, and those of decoders without a head have none.
        for text in (name, name.removeprefix("transformer."), f"model.{name}", f"{name}.weight"):  # the last: buffers
            if (found := self._names.get_name(text, try_suffixes=(".weight", ".bias"))) is not None:
                yield found

    def _converted(self, name: str, data: Array) -> Array:
        """What the converter has done, undone."""
        ours = self._ours
        if self._architecture in PLUS_ONE and name.endswith("norm.weight"):
            return data - 1
        if self._architecture in PERMUTED and ".q_proj." in name:
            return _unpermuted(data, ours.num_heads)
        if self._architecture in PERMUTED and ".k_proj." in name:
            return _unpermuted(data, ours.num_kv_heads)
        if self._architecture in GROUPED and ".query_key_value." in name:
            return _grouped(data, ours)
        if self._architecture in TRANSPOSED and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            return data.T
        return data

    def _experts(self, stem: str, last: str) -> Array:
        """The matrices of all experts of a layer. Those of gpt-oss are transposed, with rows of gate and up by
        turns."""
        part, kind = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
        if part == "down_proj":
            data = self._stacked(f"{stem}.down_proj", kind)
        else:
            gate, up = (self._stacked(f"{stem}.{one}", kind) for one in ("gate_proj", "up_proj"))
            by_turns = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])
            data = by_turns if self._ours.architecture == "gpt_oss" else np.concatenate([gate, up], 1)
        return data.swapaxes(1, 2) if self._ours.architecture == "gpt_oss" and kind == "weight" else data

    def _stacked(self, name: str, kind: str) -> Array:
        found = next(self._candidates(f"{name}.{kind}"), "")
        if (data := self.find(found)) is not None:
            return data
        each = [self.find(found.replace("_exps", f".{i}")) for i in range(self._ours.experts.num)]  # type: ignore[union-attr]
        if any(one is None for one in each):
            raise ModelError(f"{self._path}: no tensor is {shown(f'{name}.{kind}')}")
        return np.stack([one for one in each if one is not None])


def _unpermuted(data: Array, num_heads: int) -> Array:
    pairs = data.reshape(num_heads, -1, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


def _grouped(data: Array, ours: ModelConfig) -> Array:
    groups, dim = ours.num_kv_heads, ours.head_dim
    ends = np.cumsum([ours.num_heads * dim, groups * dim])
    apart = [part.reshape(groups, -1, dim, *data.shape[1:]) for part in np.split(data, ends)]
    return np.concatenate(apart, 1).reshape(data.shape)
