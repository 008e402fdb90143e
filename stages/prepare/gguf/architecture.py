"""What an architecture of .gguf files declares, and the keys that it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.prepare.gguf.metadata import Metadata, shortest
from pipeline.stages.prepare.sources.source import ModelError

Tensors = Mapping[str, Any]

EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class GgufKeys:
    """A file's keys that begin with its architecture's name, and the names of its tensors."""

    metadata: Metadata
    architecture: str
    tensors: Tensors
    num_layers: int

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.metadata.get(f"{self.architecture}.{key}", (int, float))
        return default if value is None else float(str(value)) if isinstance(value, int) else shortest(value)

    def count(self, key: str) -> int | None:
        """The integer under a key, which a file may have once for each layer; None if it is 0 or absent."""
        name = f"{self.architecture}.{key}"
        if self.metadata.get(name, (int, list)) is None:
            return None
        return self.metadata.of_all_layers(name, self.num_layers) or None

    def windowed_layers(self, every: int | None) -> list[int] | None:
        """The layers with a window, as llama.cpp finds them (`load_swa_pattern`): the file lists them, or has n for all
        but each n-th (0: all). Without that key, n is `every`, and None is returned if that is None. Raises ModelError
        unless a list has a value for each layer."""
        name = f"{self.architecture}.attention.sliding_window_pattern"
        found = self.metadata.get(name, (int, list), every)
        if not isinstance(found, list):
            return None if found is None else [i for i in range(self.num_layers) if found < 1 or (i + 1) % found]
        if len(found) != self.num_layers or not all(isinstance(value, int) for value in found):
            path = self.metadata.path
            raise ModelError(f"{path}: {name} has {len(found)} values; the model has {self.num_layers} layers")
        return [layer for layer, value in enumerate(found) if value]

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"{self.architecture}.{key}", bool, default))


SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func` (`llama_expert_gating_func_type` in llama.cpp)."""


def experts_of(keys: GgufKeys, model: ModelConfig, *, normalized: bool, reads_router: bool = False) -> Experts | None:
    """The experts of a file; None if it has none. Files say the sizes, and llama.cpp's code for each architecture
    whether weights are normalized. With `reads_router`, files say that too, and how logits become scores: then
    `normalized` is the default. Layers without a router are dense."""
    num, num_per_token = keys.count("expert_count"), keys.count("expert_used_count")
    if num is None:
        return None
    if not reads_router:
        keys.metadata.refuse_unless(f"{keys.architecture}.expert_group_count", 1, "experts in groups")
    routers = [i for i in range(model.num_layers) if f"blk.{i}.ffn_gate_inp.weight" in keys.tensors]
    first = f"blk.{next(iter(routers), 0)}."
    shared = f"{first}ffn_up_shexp.weight"
    own_size = keys.count("expert_feed_forward_length") or model.intermediate_size
    shared_size = keys.count("expert_shared_feed_forward_length")
    if shared in keys.tensors and shared_size is None:
        shared_size = keys.tensors[shared].shape[0]
    return Experts(
        num=num,
        num_per_token=num_per_token or 0,
        intermediate_size=own_size,
        **(_router(keys, normalized) if reads_router else {"normalized": normalized}),
        selection_bias=f"{first}exp_probs_b.bias" in keys.tensors,
        router_bias=f"{first}ffn_gate_inp.bias" in keys.tensors,
        bias=f"{first}ffn_up_exps.bias" in keys.tensors,
        shared_intermediate_size=shared_size or 0 if shared in keys.tensors else 0,
        shared_gate=f"{first}ffn_gate_inp_shexp.weight" in keys.tensors,
        layers=None if len(routers) in (0, model.num_layers) else routers,
    )


def _router(keys: GgufKeys, normalized: bool) -> dict[str, Any]:
    """Raises ModelError if scores are neither softmax nor sigmoid."""
    name = f"{keys.architecture}.expert_gating_func"
    function = keys.metadata.get(name, int, 0) or SIGMOID
    if function not in (SOFTMAX, SIGMOID):
        raise ModelError(
            f"{keys.metadata.path}: {name} is {function}; supported are {SOFTMAX} (softmax) and {SIGMOID} (sigmoid)"
        )
    return {
        "scoring": "sigmoid" if function == SIGMOID else "softmax",
        "normalized": keys.flag("expert_weights_norm", normalized),
        "scale": keys.number("expert_weights_scale", 0.0) or 1.0,  # llama.cpp takes 0 as none
        "num_groups": keys.count("expert_group_count") or 1,
        "groups_per_token": keys.count("expert_group_used_count") or 1,
    }


def no_fields(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """What is specific to the files of one `general.architecture`."""

    models: str
    """Model families, for error messages."""
    model_type: Architecture | None = None
    """The architecture that such a file becomes, if its name is another one."""
    interleaved_rope: bool = False
    """The converter reordered rows of q and k for rotary embeddings of adjacent pairs (`LlamaModel.permute`). If False,
    they are in Hugging Face's order."""
    has_windows: bool = False
    """The file's sliding window applies to every layer. Else it is refused, unless `read` knows the layers."""
    eps: str = EPS
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that the architecture fixes."""
    read: Callable[[GgufKeys, ModelConfig], dict[str, Any]] = no_fields
    """Further fields of ModelConfig, from keys and the presence of tensors."""
    reads_windows: bool = False
    """Whether `read` handles the sliding window."""
    reads_experts: bool = False
    """Whether `read` handles a mixture of experts."""
    reads_sizes: bool = False
    """Whether `read` handles heads and feed-forward layers of different sizes."""
    skips_attention: bool = False
    """Whether layers with 0 KV heads have something in place of attention. Else a file must not have such layers."""
    has_drafts: bool = False
    """Whether a file may have layers that draft behind those of the model."""
    reads_scaling: bool = False
    """Whether `read` handles the scaling of the rotary embedding."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in the file, if they differ from the usual ones, by their names in the model."""
