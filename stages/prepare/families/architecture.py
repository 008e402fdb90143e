"""What a family says about an architecture, and helpers for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.stages.prepare.encoders.heads import DECODER_HEADS, WITHOUT_LABELS, Head, Heads
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown

Window = tuple[int | None, list[int] | None]
"""`sliding_window` and `sliding_layers` of ModelConfig."""

NO_FIELDS: dict[str, Any] = {}


def no_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """Llama's rule: no layer has a window, even if the file names one."""
    return None, None


def as_it_is(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def no_fields(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    return NO_FIELDS


def llama_layout(model: ModelConfig) -> Layout:
    return Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class HfArchitecture:
    """How to read the config.json of one `model_type`."""

    class_name: str
    """The causal model's class, or the encoder's, as in `architectures`."""
    other_class_names: tuple[str, ...] = ()
    """Of the same model in older files."""
    models: str = ""
    """Model families, for the table of supported models; by default the class's name says it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names of keys, if they differ from Llama's."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of keys, and the names that they stand for. As in transformers, the value of an alias wins."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for absent keys, by Llama's names, if they differ from Llama's."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that the architecture fixes; config.json does not override them."""
    windows: Callable[[Mapping[str, Any], int], Window] = no_windows
    """Takes config.json and the number of layers. Raises ConfigFault."""
    inner: Callable[[Keys], int] | None = None
    """The intermediate size if the key is absent."""
    fields: Callable[[Keys, ModelConfig], dict[str, Any]] = no_fields
    """Further fields of ModelConfig. Takes the others. Raises ConfigFault for unsupported values."""
    layout: Callable[[ModelConfig], Layout] = llama_layout
    """The names and layout of its tensors in Hugging Face's checkpoints."""
    other_layouts: tuple[Callable[[ModelConfig], Layout], ...] = ()
    """Layouts of other writers."""
    adapt: Callable[[Mapping[str, Any]], Mapping[str, Any]] = as_it_is
    """Changes a config.json before it is read."""
    heads: Heads = field(default_factory=lambda: DECODER_HEADS)
    """Those of its classes for labels."""

    @property
    def stem(self) -> str:
        """What the names of its classes begin with."""
        return self.class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("Model")

    def knows(self, class_name: str) -> bool:
        """Whether `architectures` may have a name: that of the causal model, that of the model without its LM head,
        whose tensors are those of a causal model with a tied head, and those of classes for labels."""
        endings = [
            *self.heads,
            *(("Model",) if self.class_name.endswith(("CausalLM", "HeadModel")) else WITHOUT_LABELS),
        ]
        return class_name in (self.class_name, *self.other_class_names, *(f"{self.stem}{end}" for end in endings))

    def head_of(self, class_name: str) -> Callable[[Keys], Head] | None:
        """The head of a class for labels; None for other classes."""
        return next((head for end, head in self.heads.items() if class_name == f"{self.stem}{end}"), None)


LAYER_NORM = {"norm": "layer", "norm_bias": True}
FOUR_TIMES: Callable[[Keys], int] = lambda keys: 4 * keys.count("hidden_size")  # noqa: E731


def windows_by_pattern(
    every: int, window: int | None = 4096, *, has_key: bool = False
) -> Callable[[Mapping[str, Any], int], Window]:
    """The layers in `layer_types` have a window; if that is absent, all but each `every`-th layer (0: all). With
    `has_key`, `sliding_window_pattern` replaces `every`; other architectures ignore this key."""

    def windows(config: Mapping[str, Any], num_layers: int) -> Window:
        keys = Keys(config, {}, {})
        size = None if "sliding_window" in config and config["sliding_window"] is None else window
        if config.get("sliding_window") is not None:
            size = keys.count("sliding_window")
        kinds = keys.layer_kinds(num_layers)
        if size is None:
            return None, None
        if kinds is not None:
            layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        else:
            pattern = config.get("sliding_window_pattern") if has_key else None
            if pattern is None:
                layers = [i for i in range(num_layers) if not every or (i + 1) % every]
            else:
                layers = _layers_by_pattern(pattern, num_layers)
        if not layers:
            return None, None
        return size, None if len(layers) == num_layers else layers

    return windows


def _layers_by_pattern(pattern: object, num_layers: int) -> list[int]:
    """The layers with a window. EXAONE 4 has a string of L (local) and G (global), which repeats; with it, the last
    layer is always global."""
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [i for i in range(num_layers - 1) if pattern[i % len(pattern)] == "L"]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ConfigFault(
            f"sliding_window_pattern is {shown(pattern)}; it must be a positive integer, or a string of L and G"
        )
    return [i for i in range(num_layers) if (i + 1) % pattern]


def window_everywhere(config: Mapping[str, Any], num_layers: int) -> Window:
    """Every layer has the window; none if the key is absent or null."""
    value = config.get("sliding_window")
    return (None, None) if value is None else (Keys(config, {}, {}).count("sliding_window"), None)


def qkv_slices(model: ModelConfig, tensor: str, transposed: bool = False) -> dict[str, Piece]:
    """Queries, keys and values as one tensor, one below the other."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    ends = [0, queries, queries + keys, queries + 2 * keys]
    return {
        f"self_attn.{name}_proj": Piece(tensor, begin=ends[i], end=ends[i + 1], transposed=transposed)
        for i, name in enumerate("qkv")
    }


def qkv_by_head(model: ModelConfig, tensor: str) -> dict[str, Piece]:
    """Queries, keys and values as one tensor: for each key-value head the queries of its group, then its keys, then its
    values."""
    dim, group = model.head_dim, model.num_heads // model.num_kv_heads
    ends = [0, group * dim, (group + 1) * dim, (group + 2) * dim]
    return {
        f"self_attn.{name}_proj": Piece(tensor, model.num_kv_heads, ends[i], ends[i + 1])
        for i, name in enumerate("qkv")
    }


def gate_up_slices(model: ModelConfig, tensor: str = "mlp.gate_up_proj") -> dict[str, Piece]:
    """Gate and up as one tensor, one below the other."""
    inner = model.intermediate_size
    return {"mlp.gate_proj": Piece(tensor, end=inner), "mlp.up_proj": Piece(tensor, begin=inner, end=2 * inner)}


def renamed(**names: str) -> dict[str, Piece]:
    """Pieces that are whole tensors; the keys' double underscores are dots."""
    return {key.replace("__", "."): Piece(name) for key, name in names.items()}


TEXT_PREFIX = "language_model."
"""Of the tensors of a text model that is a part of one for texts and images."""
TIE = "tie_word_embeddings"
TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "muse_glimmer": "muse_glimmer_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "exaone4_5": "exaone4",
    "idefics3": "llama",
    "smolvlm": "llama",
    "llava": "llama",
    "llava_onevision": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""`model_type` of models for texts and images whose text model is served, and that of its config without one."""
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
"""Sizes that LLaVA's text_config may lack: transformers' defaults of Llama."""
QWEN2_VL = {
    "mrope_section": [16, 24, 24],
    "mrope_interleaved": False,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
QWEN3_VL = {
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}
QWEN3_5 = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
TEXT_DEFAULTS = {
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
}
"""transformers' defaults that differ from those of the architecture in TEXT_TYPES, and whether axes take turns, which
files don't say."""
TEXT_TYPES = {
    "exaone4_5_text": "exaone4",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""The architectures of text models whose `model_type` is not that."""
FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Models whose older files have the keys of the text model beside `vision_config`."""
TIED = ("gemma3", "gemma4", "gemma4_unified", "mistral3")
"""Of these, those with a tied head by default."""


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model in one for texts and images; None if it is of another kind. Raises ConfigFault
    if it is missing.

    transformers reads `tie_word_embeddings` of the whole model, which is true by default, and older versions that of
    the text model. Either makes a missing head the embedding, see stages/prepare/weights/tied_head.py.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return None
    if text is None and kind in FLAT:
        text = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if not isinstance(text, dict):
        raise ConfigFault(f"text_config is {shown(text)}; it must be the object that describes the text model")
    shared = {key: config[key] for key in ("eos_token_id", "bos_token_id") if key in config}
    ties = [Keys(part, {}, {TIE: default}).flag(TIE) for part, default in ((config, kind in TIED), (text, False))]
    own = text.get("model_type") or TEXT_PARTS[kind]
    if not isinstance(own, str):
        return {**shared, **text, "model_type": own, TIE: any(ties)}
    sizes = LLAMA_7B if kind == "llava" and own == "llama" else TEXT_DEFAULTS.get(own, {})
    return {**sizes, **shared, **_with_plain_rope(text), "model_type": TEXT_TYPES.get(own, own), TIE: any(ties)}


def _with_plain_rope(text: dict[str, Any]) -> dict[str, Any]:
    """A text has equal positions along all axes of M-RoPE (Qwen-VL), which then is plain rotary embedding."""
    changed = {
        key: {**rope, "rope_type": "default"}
        for key in ("rope_scaling", "rope_parameters")
        if isinstance(rope := text.get(key), dict) and rope.get("rope_type", rope.get("type")) == "mrope"
    }
    return {**text, **changed}


def as_part(layout: Layout) -> Layout:
    """The layout of the same tensors as a part of a model for texts and images."""
    names = (
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        *(name for name in layout.pieces if name.startswith("model.")),
    )
    outside = {name: layout.pieces.get(name) or Piece(name) for name in names}
    pieces = {
        name: msgspec.structs.replace(piece, tensor=f"{TEXT_PREFIX}{piece.tensor}") for name, piece in outside.items()
    }
    return Layout(f"{TEXT_PREFIX}{layout.layers}", layout.pieces | pieces)


def alibi_slopes(num_heads: int, scale: float = 1.0) -> list[float]:
    """The slopes of BLOOM's ALiBi, times `scale` (`build_alibi_tensor` in transformers)."""
    closest = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / closest) for i in range(closest)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / closest) for i in range(num_heads - closest)]
    return [scale * slope for slope in slopes]
