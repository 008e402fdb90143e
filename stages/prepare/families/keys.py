"""Reads values of a config.json with errors that name the key."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.runtime.model.model_config import Activation
from pipeline.stages.prepare.files import shown

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' names of activations."""


LAYER_KINDS = ("full_attention", "sliding_attention")


class ConfigFault(ValueError):
    """A wrong value in config.json: the key, its value, and what would be valid."""


class Keys:
    """The values of a config.json. `names` maps Llama's keys to those of the file; `defaults`, by Llama's keys, are
    those of absent and null keys. Methods raise ConfigFault for values of another type."""

    def __init__(self, config: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self._config, self._names, self._defaults = config, names, defaults

    def name(self, key: str) -> str:
        """The key in the file."""
        return self._names.get(key, key)

    def has_default(self, key: str) -> bool:
        """Whether the architecture has a default for a key."""
        return key in self._defaults

    def has(self, key: str) -> bool:
        """Whether the file has a key, null or not."""
        return self.name(key) in self._config

    def is_null(self, key: str) -> bool:
        """Whether the file has a key whose value is null."""
        return self.has(key) and self._config[self.name(key)] is None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._config.get(self.name(key))
        if value is None:
            return self._defaults.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise self.fault(key, f"of type {' or '.join(one.__name__ for one in kinds)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, bool, default))

    def number(self, key: str, default: float) -> float:
        """A number, as a float. Infinity if it is an integer too large for one."""
        value = self.get(key, (int, float), default)
        try:
            return float(value)
        except OverflowError:
            raise self.fault(key, "a number that fits a float") from None

    def optional_number(self, key: str) -> float | None:
        """None if the key is null; the default if it is absent."""
        return None if self.is_null(key) or self.get(key, (int, float)) is None else self.number(key, 0.0)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; required without a default."""
        value = self.get(key, int, default)
        if value is None or value < least:
            raise ConfigFault(f"{self.name(key)} is {shown(value)}; it must be an integer of at least {least}")
        return int(value)

    def refuse_unless(self, key: str, *expected: Any, what: str) -> None:
        """Raises ConfigFault if the key is present with a value that is none of `expected`."""
        value = self._config.get(self.name(key))
        if value is not None and value not in expected:
            raise ConfigFault(f"{self.name(key)} is {shown(value)}: {what} is not supported")

    def fault(self, key: str, words: str) -> ConfigFault:
        return ConfigFault(f"{self.name(key)} is {shown(self._config.get(self.name(key)))}; it must be {words}")

    def layer_kinds(self, num_layers: int, known: Sequence[str] = LAYER_KINDS) -> list[str] | None:
        """`layer_types`, of which each is `known`; None if absent."""
        kinds = self._config.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
            raise ConfigFault(
                f"layer_types is {shown(kinds)}; it must be a list of num_hidden_layers = {num_layers} values, each "
                f"one of {', '.join(known)}"
            )
        return kinds
