"""The rules for keys of a .gguf file that the server does not use. A key without a rule is named at the start.

Like llama.cpp, the server ignores keys that it does not know. But some that llama.cpp reads for every architecture
change what is computed: those are errors, unless they have the value that changes nothing.
"""

import math
from collections.abc import Iterable
from typing import Any

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import YarnRope
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.sources.source import ModelError

TOLERANCE = 1e-6
"""Relative, of numbers: files have them in float32."""

DESCRIPTIONS = ("general.", "split.", "quantize.", "mradermacher.")
"""Beginnings of the names of keys that say where a file is from and how it was made."""
SAMPLING = "general.sampling."
HARMLESS = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
    *("expert_shared_count", "expert_weights_norm", "interleave_moe_layer_step", "leading_dense_block_count"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "expert_group_used_count"),
)
"""Keys below an architecture's name that its tensors say too, or that have no effect where they are not read: windows
in models without them, rotary embeddings in models with other positions, and the length that no scaling needs."""
HARMLESS_TOKENIZER = (
    *("tokenizer.ggml.token_type_count", "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.chat_templates"),
    *("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"),
)


def refuse_changes(metadata: Metadata, architecture: str, config: ModelConfig) -> None:
    """Raises ModelError if a key that the server doesn't read would change what llama.cpp computes. Call it after all
    keys of the architecture were read."""
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    # llama.cpp's converter writes the factor of a config.json that names it, as OLMo 3's does. llama.cpp has this one,
    # whatever the file says.
    scaling = config.rope_scaling
    usual = 0.1 * math.log(scaling.factor) + 1.0 if isinstance(scaling, YarnRope) and scaling.factor > 1 else 1.0
    expected: dict[str, tuple[tuple[Any, ...], str]] = {
        "attention.causal": (
            (config.causal,),
            "attention to later tokens" if config.causal else "attention to earlier tokens only",
        ),
        "attention.key_length_swa": ((config.head_dim,), "another size of heads in layers with a window"),
        "attention.value_length_swa": ((config.head_dim,), "another size of heads in layers with a window"),
        "rope.dimension_count_swa": ((rotary_dim,), "another rotary embedding in layers with a window"),
        "rope.freq_base_swa": ((config.rope_theta,), "another rotary embedding in layers with a window"),
        "rope.scaling.attn_factor": ((0.0, 1.0), "a factor of rotated queries and keys"),
        "rope.scaling.yarn_attn_factor": ((-1.0, 1.0, usual), "a factor of rotated queries and keys"),
        "rope.scaling.yarn_ext_factor": ((-1.0, 1.0), "a part of YaRN"),
        "rope.scaling.yarn_log_multiplier": ((0.0,), "another factor of YaRN"),
        "expert_gating_func": ((0, 1, 3), "scores of experts that are no softmax"),
        "nextn_predict_layers": ((0,), "a file with layers for several tokens"),
    }
    left = set(metadata.rest())
    for key, (values, what) in expected.items():
        if (name := f"{architecture}.{key}") not in left:
            continue
        found = metadata.get(name, object)
        is_unused = key.endswith("_swa") and config.sliding_window is None
        if not is_unused and not any(_agree(found, value) for value in values):
            raise ModelError(f"{metadata.path}: {name} is {shown(found)}: {what} is not supported")
    sections = f"{architecture}.rope.dimension_sections"
    if sections in left and any(metadata.list_of(sections, int) or ()):
        raise ModelError(f"{metadata.path}: {sections} is set: a rotary embedding for images is not supported")


def _agree(found: Any, value: Any) -> bool:
    if isinstance(found, int | float) and not isinstance(found, bool) and isinstance(value, float):
        return math.isclose(found, value, rel_tol=TOLERANCE)
    return bool(found == value)


def unused(metadata: Metadata, architecture: str) -> list[str]:
    """Lines about the keys that nothing has read and that no rule names. Call it after the whole file was read."""
    left = [key for key in metadata.rest() if not _has_rule(key, architecture)]
    parts = (
        ([key for key in left if key.startswith(SAMPLING)], "as recommendations for sampling"),
        ([key for key in left if key.startswith("tokenizer.chat_template.")], "as chat templates"),
        ([key for key in left if not key.startswith((SAMPLING, "tokenizer.chat_template."))], ""),
    )
    return [_line(keys, what) for keys, what in parts if keys]


def _has_rule(key: str, architecture: str) -> bool:
    if key.startswith(DESCRIPTIONS) and not key.startswith(SAMPLING):
        return True
    prefix, _, name = key.partition(".")
    return (prefix == architecture and name in HARMLESS) or key in HARMLESS_TOKENIZER


MAX_NAMED = 8


def _line(keys: Iterable[str], what: str) -> str:
    named = list(keys)
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"the file's keys {', '.join(map(shown, named[:MAX_NAMED]))}{more} are not used{what and f' {what}'}"
