"""Keys of tiny .gguf files (tiny_architectures.py), of Gemma 4 and Apertus, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

COMMON = {
    "attention.sliding_window": 21,
    "attention.sliding_window_pattern": [True, True, False, True, True, False],
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}


def of_full_layers(dim: int) -> dict[str, Any]:
    """The keys for layers without a window, whose heads have this size."""
    return {"attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim}


SHARED_KV = {
    **COMMON,
    **of_full_layers(32),
    "attention.shared_kv_layers": 3,
    "embedding_length_per_layer_input": 32,
    "feed_forward_length": 3 * [96] + 3 * [192],
}
DENSE = {
    **COMMON,
    **of_full_layers(64),
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "attention.head_count_kv": [4, 4, 2, 4, 4, 2],
}


EXPERTS = {
    **COMMON,
    **of_full_layers(32),
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
}


WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""Names of tensors in the file that gguf-py doesn't know, by those in a layer."""


def divisors(metadata: Mapping[str, Any], part: float) -> np.ndarray:
    """The divisors of frequencies, of which this part rotates."""
    num = metadata["attention.key_length"] // 2
    turned = int(num * part)
    return np.array(turned * [1.0] + (num - turned) * [1e30], np.float32)


def xielu_keys(model: Any) -> dict[str, list[float]]:
    """The parameters of Apertus's activation, which are keys with a value for each layer."""
    found: dict[str, list[float]] = {}
    for name, tensor in model.state_dict().items():
        if ".act_fn." in name:
            found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(tensor.float().item())
    return found
