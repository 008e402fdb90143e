"""adapter_config.json of a PEFT adapter, and what of it this server supports.

The fields are those of PEFT's LoraConfig (https://huggingface.co/docs/peft/package_reference/lora). Fields that change
what is computed and that are not supported are refused by name; others are ignored.
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import UserError
from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.log.printable import printable

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1024**2
MAX_VALUES = 65_536
"""Of a config or of a header: the decoder holds Python's lock, 0.1 s and more for each megabyte of small values."""
MAX_RANK = 1024
MAX_PATTERNS = 4096
"""Keys of a pattern: each module is compared with all of them."""

_LITERAL = re.compile(r"\^?[\w.-]+\Z")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` with which PEFT changes the model's own weights, too. An adapter that PEFT has
converted to one of the unchanged weights has true instead."""
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Values with which it doesn't. Others are of a later PEFT, and may be of either kind."""


class AdapterError(UserError):
    """An adapter that can't be used; the message names the file and the field. It is one line, not longer than others:
    names and shapes in a file may be megabytes."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NotAnAdapter(AdapterError):
    """There is no file at a path, it can't be read, or nothing in it says that it is an adapter."""


class NotWritten(AdapterError):
    """The prepared adapter can't be written into the cache: it is no fault of the adapter."""


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that matter for serving."""

    peft_type: str
    r: int
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    base_model_name_or_path: str | None = None
    init_lora_weights: bool | str | None = True
    fan_in_fan_out: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    trainable_token_indices: Any = None
    target_parameters: Any = None
    kasa_config: Any = None
    arrow_config: Any = None
    monteclora_config: Any = None
    use_bdlora: Any = None

    def scaling(self, module: str, rank: int) -> float:
        """The factor of B·A in a module: alpha / rank, or with rsLoRA alpha / sqrt(rank) (Kalajdzievski, 2023,
        arXiv:2312.03732)."""
        alpha = _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def rank(self, module: str) -> int:
        """The rank that the config gives a module."""
        return int(_of_pattern(self.rank_pattern, module, self.r))


def read_config(folder: Path, deadline_s: float = math.inf, allowed: Sequence[str] = ()) -> tuple[PeftConfig, bytes]:
    """Read and check the config in a folder, and return its bytes too. Raises AdapterError, NotAnAdapter if there is
    none. The file must be in one of the folders `allowed`, if there are any."""
    path = folder / CONFIG
    try:
        data = read_regular(path, MAX_CONFIG_BYTES, deadline_s, allowed)
    except OSError as error:
        raise NotAnAdapter(f"{path}: {error.strerror}; an adapter is a folder in PEFT's format") from error
    if has_many_values(data):
        raise NotAnAdapter(f"{path}: it has more than {MAX_VALUES} values")
    try:
        config = msgspec.json.decode(data, type=PeftConfig)
    except (ValueError, RecursionError) as error:
        kind = AdapterError if _has_peft_type(data) else NotAnAdapter
        raise kind(f"{path}: {error}") from error
    if problem := _problem(config):
        raise AdapterError(f"{path}: {problem}")
    return config, data


def has_many_values(json: bytes) -> bool:
    """Whether there may be more than MAX_VALUES values in a text of JSON."""
    return json.count(b",") >= MAX_VALUES or json.count(b"[") + json.count(b"{") > MAX_VALUES


def _has_peft_type(data: bytes) -> bool:
    try:
        return "peft_type" in msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return False


def _problem(config: PeftConfig) -> str | None:
    """Why an adapter can't be served, in words that name the field."""
    if config.peft_type.upper() != "LORA":
        return f"peft_type is {config.peft_type[:40]!r}; supported is LORA"
    if not 0 < config.r <= MAX_RANK:
        return f"r is {str(config.r)[:40]}; it must be from 1 to {MAX_RANK}"
    if config.bias != "none":
        return f"bias is {config.bias[:40]!r}; supported is none"
    for name in ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"):
        if getattr(config, name):
            return f"{name} is true, which is not supported"
    for name in (
        *("modules_to_save", "layer_replication", "alora_invocation_tokens", "trainable_token_indices"),
        *("target_parameters", "kasa_config", "arrow_config", "monteclora_config", "use_bdlora"),
    ):
        if getattr(config, name):
            return f"{name} is set, which is not supported"
    if (problem := _problem_of_init(config.init_lora_weights)) is not None:
        return problem
    for field in ("rank_pattern", "alpha_pattern"):
        if len(getattr(config, field) or {}) > MAX_PATTERNS:
            return f"{field} has more than {MAX_PATTERNS} keys"
        for key, value in (getattr(config, field) or {}).items():
            if not _LITERAL.match(key):
                return f"{field} has the key {key[:60]!r}; supported are names of modules, without other patterns"
            if not 0 < value <= (MAX_RANK if field == "rank_pattern" else sys.float_info.max):
                return f"{field} has {str(value)[:40]} for {key[:60]!r}"
    if not math.isfinite(config.lora_alpha):
        return f"lora_alpha is {config.lora_alpha}"
    return None


def _problem_of_init(init: bool | str | None) -> str | None:
    if not isinstance(init, str) or init.lower() in _KEEPS_BASE:
        return None
    named = f"init_lora_weights is {init[:40]!r}"
    if init.lower().startswith("loftq"):  # its base has other weights, and PEFT has no conversion
        return f"{named}, which changes the model's own weights: merge the adapter into them with PEFT"
    if init.lower().startswith(_CHANGES_BASE):
        return (
            f"{named}, which changes the model's own weights: convert the adapter with PEFT "
            "(path_initial_model_for_weight_conversion)"
        )
    return f"{named}, which is not known here; supported are true, false, {', '.join(_KEEPS_BASE)}"


def _of_pattern(pattern: "dict[str, int] | dict[str, float] | None", module: str, default: float) -> float:
    """The value of the first key that is the module's name or the end of it, from a point on."""
    for key, value in (pattern or {}).items():
        name = key.removeprefix("^")
        if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
            return value
    return default
