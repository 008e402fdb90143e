"""`[models.NAME]`: several models behind one address, each with settings of its own.

    memory_bytes = "24GiB"            # of all models
    [execute]
    kv_cache_bytes = "1GiB"           # of each model that does not say otherwise

    [models.chat]
    model = "qwen3:0.6b"
    pinned = true
    [models.vectors]
    model = "/models/minilm"
    aliases = ["text-embedding-3-small"]
    [models.vectors.execute]
    kv_cache_bytes = "64MiB"

A model's settings are those of the file's top with its table on them. `--model a --model b` are two such tables.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec

from pipeline.config import load
from pipeline.config.closest import closest
from pipeline.config.load import MODELS, ConfigError, Origin
from pipeline.config.settings import Settings

MAX_MODELS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,127}")
SHARED = (
    "access_log",
    "gateway.admin_host",
    "gateway.admin_port",
    "gateway.allow_credentials",
    "gateway.allow_unauthenticated",
    "gateway.allowed_headers",
    "gateway.allowed_hosts",
    "gateway.allowed_methods",
    "gateway.allowed_origins",
    "gateway.api_keys_file",
    "gateway.host",
    "gateway.max_body_bytes",
    "gateway.max_media_body_bytes",
    "gateway.page",
    "gateway.port",
    "gateway.replicas",
    "gateway.ssl_ca_certs",
    "gateway.ssl_certfile",
    "gateway.ssl_keyfile",
    "gateway.zmq",
    "keys",
    "limits.max_header_bytes",
    "limits.max_json_depth",
    "log_format",
    "log_level",
    "memory_bytes",
    "ray",
    "swap_quantum_s",
    "transport",
)
"""Keys, and sections, of the whole server: a model's table can't have them."""
OF_ONE = ("model", "served_model_name", "aliases", "chat_template")
"""Keys that can't be the same for several models."""


class ServerSettings(msgspec.Struct, frozen=True):
    """The settings of a server and of its models."""

    shared: Settings
    """Of what the models share; with one model, its own."""
    models: dict[str, Settings] = {}
    """By name, in the order of the file; empty for a server of one model that has no table."""


def load_server(
    path: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    options: Sequence[tuple[Origin, str]] = (),
    warn: Callable[[str], None] = load._warn,
    models: Sequence[str] = (),
) -> ServerSettings:
    """As `load.load`, for a server that may have several models. `models` are texts `MODEL` or `NAME=MODEL`, if there
    are at least two: those of --model. Raises ConfigError with all problems."""
    file = {} if path is None else load.read_file(path)
    tables = _tables(str(path), file.pop(MODELS, {}))
    for text in models:
        name, table = _of_option(text)
        if name in tables:
            raise ConfigError([f"--model {text}: there is a model {name} already; NAME=MODEL gives it another name"])
        tables[name] = (f"--model {text}", table)
    files = [] if path is None else [(str(path), file)]
    own_sets, shared_sets = _own_sets(sets, tables)
    if not tables:
        return ServerSettings(load.merge(files, shared_sets, flags, None, options, warn))
    if len(tables) > MAX_MODELS:
        raise ConfigError([f"{MODELS}: a server has at most {MAX_MODELS}, got {len(tables)}"])
    shared = load.merge(files, shared_sets, flags, None, options, warn)
    problems = _problems_of_shared(shared)
    found: dict[str, Settings] = {}
    for name, (origin, table) in tables.items():
        if wrong := _problems_of_table(origin, table, own_sets[name]):
            problems += wrong
            continue
        texts = [*shared_sets, *own_sets[name]]
        try:
            settings = load.merge([*files, (origin, table)], texts, flags, None, options, _mute)
        except ConfigError as error:
            problems += [one if MODELS in one else f"[{MODELS}.{name}]: {one}" for one in error.problems]
        else:
            problems += _problems_of_one(name, settings, shared)
            found[name] = msgspec.structs.replace(settings, served_model_name=name)
    problems += _double_names(found)
    if problems:
        raise ConfigError(problems)
    return ServerSettings(shared, found)


def _mute(text: str) -> None:
    """The shared settings have given this warning."""


def _tables(path: str, given: Any) -> dict[str, tuple[Origin, dict[str, Any]]]:
    """The tables of a file, by name, each with its origin. Raises ConfigError."""
    if not isinstance(given, dict):
        raise ConfigError([f"{path}: {MODELS}: has a table for each model, [{MODELS}.NAME]"])
    problems = []
    for name, table in given.items():
        if not NAME.fullmatch(name):
            problems.append(
                f"{path}: [{MODELS}.{name[:100]!r}]: a name has 1 to 128 letters, digits and . _ @ : / + -, the first "
                "one a letter or digit"
            )
        elif not isinstance(table, dict):
            problems.append(f"{path}: {MODELS}.{name}: is a table, written [{MODELS}.{name}]")
    if problems:
        raise ConfigError(problems)
    return {name: (f"{path}: [{MODELS}.{name}]", table) for name, table in given.items()}


def _of_option(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the table of `NAME=MODEL`, or of a MODEL whose name is its own: of a path, its last part."""
    name, equals, model = text.partition("=")
    if not equals or "/" in name or name.startswith("wheel:"):
        model = text
        name = PurePath(text).name.removesuffix(".gguf") if Path(text).exists() else text.replace("==", "-")
    if not NAME.fullmatch(name) or not model:
        raise ConfigError([f"--model {text}: has no name for clients; give it one: --model NAME={model or 'MODEL'}"])
    return name, {"model": model}


def _own_sets(sets: Sequence[str], names: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """Of texts `models.NAME.key=value`, the rest behind the name, by name; and the other texts. Raises ConfigError."""
    own: dict[str, list[str]] = {name: [] for name in names}
    others = []
    for text in sets:
        if not text.startswith(f"{MODELS}."):
            others.append(text)
            continue
        rest = text.removeprefix(f"{MODELS}.")
        fits = [name for name in names if rest.startswith((f"{name}.", f'"{name}".'))]
        if not fits:
            wrong = rest.partition("=")[0].rpartition(".")[0]
            hint = closest(wrong, names) or f"; models are {', '.join(names) or 'none'}"
            raise ConfigError([f"--set {text}: there is no model {wrong[:100]!r}{hint}"])
        name = max(fits, key=len)
        own[name].append(rest.removeprefix(f'"{name}".').removeprefix(f"{name}."))
    return own, others


def _problems_of_table(origin: Origin, table: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
    """What is wrong with a model's table, and with its texts `key=value`."""
    problems = [f"{origin}: {key}: is of the whole server; set it at the top" for key in _shared_keys(table)]
    keys = [text.partition("=")[0].strip() for text in sets]
    problems += [
        f"--set {text}: is of the whole server; set it without {MODELS}.NAME"
        for key, text in zip(keys, sets, strict=True)
        if any(key == one or key.startswith(f"{one}.") for one in SHARED)
    ]
    if not (table.get("model") or "model" in keys):
        problems.append(f"{origin}: needs a model: a folder, a .gguf file, a hub id or a well-known name")
    if "served_model_name" in table or "served_model_name" in keys:
        problems.append(f"{origin}: served_model_name: the name of the table is the model's; aliases adds others")
    return problems


def _problems_of_shared(shared: Settings) -> list[str]:
    """What the top of the file can't have with several models."""
    problems = [
        f"{key}: can't be the same for several models; set it in [{MODELS}.NAME]"
        for key in OF_ONE
        if getattr(shared, key) != getattr(Settings(), key)
    ]
    if shared.gateway.replicas > 1:
        problems.append("gateway.replicas: several models have one gateway: leave it at 1")
    if shared.execute.launcher != "process":
        problems.append("execute.launcher: several models run on this machine: leave it at 'process'")
    if shared.execute.device != "cpu" and not shared.memory_bytes:
        problems.append("memory_bytes: with several models on a GPU, set the memory of it that they may use together")
    return problems


def _problems_of_one(name: str, settings: Settings, shared: Settings) -> list[str]:
    """What one of several models can't have. One that takes what is left of a GPU leaves nothing to the others."""
    problems, execute = [], settings.execute
    if execute.launcher != "process" and shared.execute.launcher == "process":
        problems.append("execute.launcher: several models run on this machine: leave it at 'process'")
    if execute.device != "cpu" and not execute.kv_cache_bytes:
        problems.append("execute.kv_cache_bytes: with several models on a GPU, set the size of each KV cache")
    return [f"[{MODELS}.{name}]: {one}" for one in problems]


def _shared_keys(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys in a model's table that are of the whole server."""
    found = []
    for name, value in table.items():
        if prefix + name in SHARED:
            found.append(prefix + name)
        elif isinstance(value, dict):
            found += _shared_keys(value, f"{prefix}{name}.")
    return found


def _double_names(models: Mapping[str, Settings]) -> list[str]:
    """Names, aliases and adapters that two models have."""
    owners: dict[str, str] = {name: name for name in models}
    return [
        f"[{MODELS}.{name}]: {key}: {other!r} is a name of {owner} already"
        for key, others_of in (("aliases", _aliases), ("lora.adapters", _adapters))
        for name, settings in models.items()
        for other in others_of(settings)
        if (owner := owners.setdefault(other, name)) != name or other == name
    ]


def _aliases(settings: Settings) -> Iterable[str]:
    return settings.aliases


def _adapters(settings: Settings) -> Iterable[str]:
    return settings.lora.adapters
