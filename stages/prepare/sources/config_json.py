"""Reads a Hugging Face config.json."""

from pathlib import Path
from typing import Any

import msgspec

from pipeline.runtime.model import foreign
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES, architecture_of, find_architecture, flags_of
from pipeline.stages.prepare.encoders.heads import Head
from pipeline.stages.prepare.families.architecture import as_part, text_part
from pipeline.stages.prepare.families.keys import ACTIVATIONS, ConfigFault, Keys
from pipeline.stages.prepare.families.ropes import read_ropes, rope_axes, scaled_context
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import MAX_LAYERS, as_float, check_ids, check_shape, derived_head_dim
from pipeline.stages.prepare.sources.source import ModelError

KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "original_max_position": "original_max_position_embeddings",
}
"""Keys of config.json that differ from the field names of ModelConfig."""

UNCHANGED = ("hidden_size", "intermediate_size", "rms_norm_eps", "num_experts", "num_experts_per_tok")
"""Fields with the name of Llama's key."""
SOFTCAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}


class ConfigReader:
    """Reads a Hugging Face config.json. Absent keys have transformers' defaults for the architecture."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.notes: list[str] = []
        """Lines about values that follow from several keys; `model` adds them."""
        try:
            text = text_part(config)
        except ConfigFault as fault:
            raise ModelError(f"{path}: {fault}") from fault
        self._is_part = text is not None
        self._config = config if text is None else {**text, "architectures": None}
        self._keys = Keys(config, {}, {})

    def model(self, name: str, weight_files: list[Path], generation: dict[str, Any]) -> ModelConfig:
        try:
            return self._model_of_any(name, weight_files, generation)
        except ConfigFault as fault:
            raise ModelError(f"{self.path}: {fault}") from fault

    def _model_of_any(self, name: str, weight_files: list[Path], generation: dict[str, Any]) -> ModelConfig:
        """Raises UserError for whatever a package's description of an architecture raises or gets wrong."""
        kind = self.architecture()
        package = None if kind in HF_ARCHITECTURES else foreign.find(kind)
        if package is None:
            return self._model(name, weight_files, generation)
        with foreign.errors_of(f"{package.config} of model_type {kind!r} failed"):
            try:
                found = self._model(name, weight_files, generation)
            except ConfigFault as fault:
                raise ModelError(f"{self.path}: {fault}") from fault
            return msgspec.convert(msgspec.to_builtins(found), ModelConfig)

    def _model(self, name: str, weight_files: list[Path], generation: dict[str, Any]) -> ModelConfig:
        name_of_kind = self.architecture()
        kind = architecture_of(name_of_kind)
        self._config = dict(kind.adapt(self._config))
        given = {key: alias for alias, key in kind.aliases.items() if self._config.get(alias) is not None}
        self._config = {**self._config, **{key: self._config[alias] for key, alias in given.items()}}
        llama_keys = {key: llama_key for llama_key, key in kind.keys.items()}
        written = {llama_keys.get(key, key): alias for key, alias in given.items()}
        keys = self._keys = Keys(self._config, {**kind.keys, **written}, kind.defaults)
        activation = keys.get("hidden_act", str, "silu")
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ConfigFault(f"{keys.name('hidden_act')} is {shown(activation)}; supported are {known}")
        heads, hidden, vocab_size = (self._need(key) for key in ("num_attention_heads", "hidden_size", "vocab_size"))
        names = {field: keys.name(key) for field, key in KEYS.items()}
        names |= SOFTCAPS | {field: keys.name(field) for field in UNCHANGED}
        # Null means the same for all architectures; absent, some have another default.
        head_dim = None if keys.is_null("head_dim") else keys.get("head_dim", int)
        if head_dim is None:
            head_dim = derived_head_dim(hidden, heads, self.path, names)
        eos_ids = _token_ids("eos_token_id", self._config, vocab_size, self.path)
        eos_ids += _token_ids("eos_token_id", generation, vocab_size, self.path.parent / "generation_config.json")
        num_layers = self._need("num_hidden_layers")
        window, windowed = kind.windows(self._config, min(num_layers, MAX_LAYERS))
        inner = keys.get("intermediate_size", int)
        if inner is None and kind.inner is not None:
            inner = kind.inner(keys)
        ropes = read_ropes(keys)
        flags = flags_of(kind, keys)
        max_position, scaled = scaled_context(ropes, keys, keys.get("max_position_embeddings", int, 2048))
        self.notes += scaled
        fields: dict[str, Any] = {
            "num_kv_heads": self._num_kv_heads(heads),
            "rms_norm_eps": as_float(keys.get("rms_norm_eps", (int, float), 1e-6)),
            "rope_theta": ropes.main.theta,
            "rope_scaling": ropes.main.scaling,
            "sliding_rope": None if window is None or ropes.sliding == ropes.main else ropes.sliding,
            "rotary_dim": ropes.rotary_dim(head_dim),
            "rope_axes": rope_axes(keys, ropes.rotary_dim(head_dim) or head_dim),
            "activation": ACTIVATIONS[activation],
            **flags,
        }
        config = ModelConfig(
            name=name,
            architecture=name_of_kind,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=self._need("intermediate_size") if inner is None else inner,
            num_heads=heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_position=max_position,
            sliding_window=window,
            sliding_layers=windowed,
            tie_embeddings=keys.get("tie_word_embeddings", bool, False),
            eos_ids=list(dict.fromkeys(eos_ids)),
            bos_id=next(iter(_token_ids("bos_token_id", self._config, vocab_size, self.path)), None),
            weight_files=[str(path) for path in weight_files],
            **fields,
        )
        check_shape(config, self.path, names)
        config = msgspec.structs.replace(config, **kind.fields(keys, config))
        layout = kind.layout(config)
        config = msgspec.structs.replace(config, layout=as_part(layout) if self._is_part else layout)
        check_shape(config, self.path, names)
        return config

    def architecture(self) -> str:
        """The name of the architecture. Raises ModelError if it is not supported, or UserError if it is that of a
        broken package."""
        kind = self._config.get("model_type")
        classes = self._config.get("architectures") or []
        if not isinstance(classes, list):
            raise ModelError(f"{self.path}: architectures is {shown(classes)}; it must be a list of names")
        architecture = find_architecture(kind)
        if architecture is None:
            raise ModelError(
                f"{self.path}: model_type is {shown(kind)}, which is not supported; `pipeline models --supported` "
                "lists those that are"
            )
        if classes and not (isinstance(classes[0], str) and architecture.knows(classes[0])):
            labels = " or ".join(f"{architecture.stem}{end}" for end in architecture.heads)
            raise ModelError(
                f"{self.path}: architectures is {shown(classes)}; for model_type {kind!r} only "
                f"{architecture.class_name} is supported, and for labels {labels}"
            )
        return str(kind)

    def head(self) -> Head | None:
        """The head of the class in `architectures`, if that is one for labels. Call it after `model`. Raises
        ModelError."""
        classes = self._config.get("architectures") or [""]
        make = architecture_of(self.architecture()).head_of(classes[0])
        try:
            return None if make is None else make(self._keys)
        except ConfigFault as fault:
            raise ModelError(f"{self.path}: {fault}") from fault

    def _num_kv_heads(self, num_heads: int) -> int:
        """num_key_value_heads; `num_heads` if it is null, the architecture's default if it is absent."""
        given = "num_key_value_heads" in self._config
        if given and self._config["num_key_value_heads"] is None:
            return num_heads
        number = self._keys.get("num_key_value_heads", int)
        return num_heads if number is None else int(number)

    def _need(self, key: str) -> int:
        value = self._keys.get(key, int)
        if value is None or value < 1:
            raise ModelError(f"{self.path}: {self._keys.name(key)} is {shown(value)}; it must be a positive integer")
        return int(value)


def reply_ends(eos_ids: list[int], generation: dict[str, Any]) -> list[str]:
    """A line if replies also end at ids that generation_config.json doesn't name, where transformers takes only those.
    `eos_ids` are those of all files."""
    value = generation.get("eos_token_id")
    named = value if isinstance(value, list) else [] if value is None else [value]
    others = [i for i in eos_ids if i not in named]
    if not named or not others:
        return []
    return [
        f"replies also end at the ids {shown(others)} of config.json or the tokenizer, which eos_token_id of "
        "generation_config.json does not name"
    ]


def _token_ids(key: str, where: dict[str, Any], vocab_size: int, path: Path) -> list[int]:
    """The ids of a key whose value is an id, a list of ids, or null. Raises ModelError if it is anything else."""
    value = where.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{path}: {key} is {shown(value)}; it must be an id or a list of ids")
    check_ids(ids, vocab_size, path, key)
    return list(ids)
