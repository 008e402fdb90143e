"""The rules for tensors of a checkpoint that a model does not use. A tensor without a rule is an error.

Each rule says why the result is the same without the tensor, or what the server doesn't do with it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensor_names import is_part
from pipeline.stages.prepare.weights.tensors import Found


@dataclass(frozen=True, slots=True)
class Rule:
    """Why some tensors may stay unused."""

    reason: str
    matches: Callable[[str], bool]
    """Takes the name of a tensor that no part of the model has."""


ROTARY = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Last parts of the names of buffers in old checkpoints."""
MASKS = {
    "gpt2": (".attn.bias", ".attn.masked_bias"),
    "gpt_bigcode": (".attn.bias", ".attn.masked_bias"),
    "gpt_neox": (".attention.bias", ".attention.masked_bias"),
}
"""The same of causal masks, by architecture. In others, such a name is that of a bias."""
IMAGES = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector."),
    *("embed_vision.", "audio_tower.", "embed_audio.", "image_newline", "vision_embedder."),
    *("vision_adapter.", "vision_projection."),
)
"""Prefixes of the tensors for images and sounds, in models for texts and these."""
OWN_KV = tuple(f".self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
"""Last parts of the names of a layer's tensors for its keys and values."""
OTHER_HEADS = (
    *("cls.", "lm_head.", "pooler.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "decoder.", "head."),
    *("qa_outputs.", "classifier.", "predictions."),
)
"""Prefixes of the tensors of heads, of which a model that does not generate uses those of its class."""
OTHER_HEAD_BIASES = ("lm_head.bias", "decoder.bias")


DRAFTS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("mtp.",)),
    "exaone4": ("mtp.",),
    "ernie4_5_moe": ("model.mtp_",),
}
"""Prefixes of tensors that only predict further tokens (MTP), by architecture."""
DRAFTS_AS_LAYERS = ("glm4_moe",)
"""Architectures whose layers behind the last one do that."""


def _drafts(name: str, config: ModelConfig) -> bool:
    if config.architecture not in DRAFTS_AS_LAYERS:
        return name.startswith(DRAFTS.get(config.architecture, ()))
    layer = _layer_of(name, config)
    return layer is not None and layer >= config.num_layers


def _layer_of(name: str, config: ModelConfig) -> int | None:
    """The number of the layer that a tensor belongs to; None if that is none."""
    before, behind = config.layout.layers.split("{}")
    number = name.removeprefix(before).partition(behind)[0]
    return int(number) if name.startswith(before) and number.isdecimal() else None


def _keys_of_readers(name: str, config: ModelConfig) -> bool:
    layer = _layer_of(name, config)
    return layer is not None and config.kv_source(layer) != layer and name.endswith(OWN_KV)


def rules_of(config: ModelConfig, *, has_tower: bool = False) -> list[Rule]:
    """The rules for a checkpoint of floats. `has_tower`: a vision tower is read, but it need not use all tensors for
    images."""
    rules = [Rule("rotary frequencies are computed from config.json", lambda name: name.endswith(ROTARY))]
    if (masks := MASKS.get(config.architecture)) is not None:
        rules.append(Rule("causal masks are computed", lambda name: name.endswith(masks)))
    if is_part(config.layout):
        images = "the vision tower does not use them" if has_tower else "images are not served"
        rules.append(Rule(images, lambda name: name.removeprefix("model.").startswith(IMAGES)))
    if config.first_shared_kv_layer is not None:
        rules.append(
            Rule("the layer reads the keys and values of another", lambda name: _keys_of_readers(name, config))
        )
    rules.append(Rule("multi-token prediction is not supported", lambda name: _drafts(name, config)))
    if not config.generates:
        base = config.layout.layers.partition(".")[0]
        rules.append(Rule("positions are computed", lambda name: name.endswith(".position_ids")))
        rules.append(
            Rule(
                "heads of other classes are not used",
                lambda name: name.removeprefix(f"{base}.").startswith(OTHER_HEADS) or name in OTHER_HEAD_BIASES,
            )
        )
    if config.tie_embeddings:
        head = config.layout.find("lm_head.weight")[0]
        rules.append(Rule("the LM head equals the embedding, and is tied to it", lambda name: name == head))
    return rules


def ignored(rules: Sequence[Rule], names: Iterable[str], found: Found) -> list[str]:
    """A line for each rule that lets some of the tensors `names` stay unused. Raises ModelError, naming the tensor, if
    one has no rule."""
    by_rule: dict[str, list[str]] = {}
    for name in names:
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is None:
            path, _ = found[name]
            raise ModelError(f"{path}: tensor {shown(name)} is not part of the model that config.json describes")
        by_rule.setdefault(rule.reason, []).append(name)
    return [
        f"ignored {shown(of_rule[0])}" + (f" and {len(of_rule) - 1} more" if of_rule[1:] else "") + f": {reason}"
        for reason, of_rule in by_rule.items()
    ]
