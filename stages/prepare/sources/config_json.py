"""Reads a Hugging Face config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline.runtime.model_folder import Architecture, Llama3Rope, ModelConfig
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES, ConfigFault, flags_of
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


class ConfigReader:
    """Reads a Hugging Face config.json. Absent keys have transformers' defaults for the architecture."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self._config = config
        self._defaults: Mapping[str, Any] = {}

    def model(self, name: str, weight_files: list[Path], generation: dict[str, Any]) -> ModelConfig:
        name_of_kind = self._architecture()
        kind = HF_ARCHITECTURES[name_of_kind]
        self._defaults = kind.defaults
        activation = self._get("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"{self.path}: hidden_act is {shown(activation)}; 'silu' is supported")
        heads = self._need("num_attention_heads")
        hidden = self._need("hidden_size")
        vocab_size = self._need("vocab_size")
        head_dim = self._get("head_dim", int, None)
        theta, scaling = self._rope()
        eos_ids = _token_ids("eos_token_id", self._config, vocab_size, self.path)
        eos_ids += _token_ids("eos_token_id", generation, vocab_size, self.path.parent / "generation_config.json")
        num_layers = self._need("num_hidden_layers")
        try:
            window, windowed = kind.windows(self._config, min(num_layers, MAX_LAYERS))
            flags = flags_of(kind, self._config)
        except ConfigFault as fault:
            raise ModelError(f"{self.path}: {fault}") from fault
        config = ModelConfig(
            name=name,
            architecture=name_of_kind,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=self._need("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._num_kv_heads(heads),
            head_dim=derived_head_dim(hidden, heads, self.path, KEYS) if head_dim is None else head_dim,
            vocab_size=vocab_size,
            max_position=self._get("max_position_embeddings", int, 2048),
            rms_norm_eps=as_float(self._get("rms_norm_eps", (int, float), 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=window,
            sliding_layers=windowed,
            tie_embeddings=self._get("tie_word_embeddings", bool, False),
            qkv_bias=flags["qkv_bias"],
            out_bias=flags["out_bias"],
            mlp_bias=flags["mlp_bias"],
            qk_norm=flags.get("qk_norm", False),
            eos_ids=list(dict.fromkeys(eos_ids)),
            bos_id=next(iter(_token_ids("bos_token_id", self._config, vocab_size, self.path)), None),
            weight_files=[str(path) for path in weight_files],
        )
        check_shape(config, self.path, KEYS)
        return config

    def _architecture(self) -> Architecture:
        kind = self._config.get("model_type")
        classes = self._config.get("architectures") or []
        if not isinstance(classes, list):
            raise ModelError(f"{self.path}: architectures is {shown(classes)}; it must be a list of names")
        for name, architecture in HF_ARCHITECTURES.items():
            if kind == name:
                if classes and classes[0] != architecture.class_name:
                    raise ModelError(
                        f"{self.path}: architectures is {shown(classes)}; for model_type {kind!r} only "
                        f"{architecture.class_name} is supported"
                    )
                return name
        known = ", ".join(map(repr, HF_ARCHITECTURES))
        raise ModelError(f"{self.path}: model_type is {shown(kind)}; supported are {known}")

    def _num_kv_heads(self, num_heads: int) -> int:
        """num_key_value_heads; `num_heads` if it is null, the architecture's default if it is absent."""
        default = None if "num_key_value_heads" in self._config else self._defaults.get("num_key_value_heads")
        number = self._get("num_key_value_heads", int, None) if default is None else default
        return num_heads if number is None else int(number)

    def _rope(self) -> tuple[float, Llama3Rope | None]:
        """Base and scaling: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`, which take
        precedence as they do in transformers."""
        key = "rope_scaling" if self._config.get("rope_scaling") else "rope_parameters"
        rope = self._config.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"{self.path}: {key} is {shown(rope)}, not an object")
        if by_layer := next((name for name, value in rope.items() if isinstance(value, dict)), None):
            raise ModelError(f"{self.path}: {key} has separate parameters for {shown(by_layer)}: not supported")
        part = rope.get("partial_rotary_factor", self._config.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise ModelError(
                f"{self.path}: partial_rotary_factor is {shown(part)}: partial rotary embedding is not supported"
            )
        theta = rope.get("rope_theta", self._config.get("rope_theta", 10000.0))
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise ModelError(f"{self.path}: rope_theta is {shown(theta)}, not a number")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return as_float(theta), None
        if kind != "llama3":
            raise ModelError(f"{self.path}: {key} has rope_type {shown(kind)}; supported are 'default' and 'llama3'")
        names = {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position": "original_max_position_embeddings",
        }
        if "original_max_position_embeddings" in self._config:  # takes precedence in transformers
            rope = {**rope, "original_max_position_embeddings": self._config["original_max_position_embeddings"]}
        missing = [theirs for theirs in names.values() if theirs not in rope]
        if missing:
            raise ModelError(f"{self.path}: {key} of type 'llama3' lacks {missing[0]!r}")
        try:
            return as_float(theta), msgspec.convert({ours: rope[theirs] for ours, theirs in names.items()}, Llama3Rope)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.path}: {key}: {error}") from error

    def _need(self, key: str) -> int:
        value = self._get(key, int, None)
        if value is None or value < 1:
            raise ModelError(f"{self.path}: {key} is {shown(value)}; it must be a positive integer")
        return int(value)

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            return self._defaults.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: {key} is {shown(value)}, not of type {kind}")
        return value


def _token_ids(key: str, where: dict[str, Any], vocab_size: int, path: Path) -> list[int]:
    """The ids of a key whose value is an id, a list of ids, or null. Raises ModelError if it is anything else."""
    value = where.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{path}: {key} is {shown(value)}; it must be an id or a list of ids")
    check_ids(ids, vocab_size, path, key)
    return list(ids)
