"""`pipeline models`: the models that are served, cached and supported."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.cli.cache.command import ago
from pipeline.cli.cache.entries import Entry, entries_of, hub_entries, repository_of, root_of
from pipeline.cli.complain import complain
from pipeline.cli.no_server import START_ONE
from pipeline.cli.server_choice import look
from pipeline.cli.watch import draw
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.weight_headers import TensorEntry, decode_header, header_of
from pipeline.supervisor.admin.admin_client import find_servers

SUPPORTED = "pipeline.stages.prepare.supported"
"""The module with a typical model of each architecture."""
FEATURES = "pipeline.stages.execute.models.features"
"""The module that knows what back ends can compute."""

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""The names of safetensors' dtypes in the settings."""


class ServedModel(msgspec.Struct, frozen=True):
    model: str
    address: str
    pid: int
    state: str
    max_model_len: int


class CachedModel(msgspec.Struct, frozen=True):
    name: str
    """Its name for clients."""
    architecture: str
    model: str
    """What `pipeline serve` takes to serve it."""
    weights: str
    """Formats of its weights, such as q4_1 and q8_0."""
    num_bytes: int
    last_used_s: float
    """Unix time."""
    in_use: bool
    path: str


class SupportedModels(msgspec.Struct, frozen=True):
    architecture: str
    huggingface: str
    """The class in config.json's `architectures`."""
    gguf: str
    """Names in .gguf files; empty if they are not supported."""
    models: str = ""
    """Model families."""
    backends: list[str] = []
    """The back ends that compute it: "native" and "torch" on a CPU, "triton" on a GPU."""


class Models(msgspec.Struct, frozen=True):
    served: list[ServedModel]
    cached: list[CachedModel]
    supported: list[SupportedModels]


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if the cache can't be read or a server does not answer."""
    if args.supported:
        if args.json:
            print(msgspec.json.encode(supported_models()).decode())
        else:
            _print_supported(supported_models(), draw.console())
        return 0
    servers, silent = look(find_servers())
    try:
        entries = entries_of(root_of(settings))
        cached = [*cached_models(entries), *downloaded_models(entries)]
    except (UserError, OSError) as error:
        complain("pipeline models", error)
        return 1
    served = [ServedModel(one.model, one.address, one.pid, one.state, one.max_model_len) for one in servers]
    models = Models(served, cached, supported_models())
    if args.json:
        print(msgspec.json.encode(models).decode())
    else:
        _print(models)
    for problem in silent:
        print(f"pipeline models: {problem}", file=sys.stderr)
    return 1 if silent else 0


def cached_models(entries: Sequence[Entry]) -> list[CachedModel]:
    """The prepared models among the cache's entries, the last used first."""
    wheels = [entry for entry in entries if entry.kind == "wheel"]
    found = []
    for entry in entries:
        if entry.kind != "model":
            continue
        try:
            config = ModelConfig.load(Path(entry.path))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # of another version
        wheel = next((one for one in wheels if Path(entry.source).is_relative_to(one.path)), None)
        source = entry.source if wheel is None else wheel.source
        facts = (config.name, config.architecture, source, weights_of(config, entry.path))
        found.append(CachedModel(*facts, entry.num_bytes, entry.last_used_s, entry.in_use, entry.path))
    return sorted(found, key=lambda model: -model.last_used_s)


def downloaded_models(entries: Sequence[Entry]) -> list[CachedModel]:
    """The models in the hub's own cache of which no server has prepared anything yet. Raises OSError."""
    prepared = {repository_of(entry.source) for entry in entries if entry.kind == "model"}
    return [
        CachedModel(one.name, "", one.source, "", one.num_bytes, one.last_used_s, False, one.path)
        for one in hub_entries(entries)
        if one.source not in prepared
    ]


def weights_of(config: ModelConfig, folder: str) -> str:
    """The formats of a prepared model's weights, from the headers of its files; empty if one is gone."""
    quantized: set[str] = set()
    tensors: list[TensorEntry] = []
    try:
        for path in config.weight_paths(folder):
            entries, metadata = decode_header(header_of(path))
            quantized |= {value for key, value in metadata.items() if key.startswith(format_key(""))}
            tensors += entries.values()
    except (OSError, ValueError):
        return ""
    floats = {FLOATS.get(tensor.dtype, tensor.dtype) for tensor in tensors if len(tensor.shape) > 1}
    return "+".join(sorted(quantized or floats))


def supported_models() -> list[SupportedModels]:
    """Every architecture. A model's config.json may need more than the typical one that this looks at."""
    supported, features = importlib.import_module(SUPPORTED), importlib.import_module(FEATURES)
    return [
        SupportedModels(
            name,
            one.class_name,
            supported.gguf_of(name),
            supported.models_of(name),
            features.backends_of(supported.typical_config(name)),
        )
        for name, one in supported.HF_ARCHITECTURES.items()
    ]


def _print(models: Models) -> None:
    console = draw.console()
    console.print("Served", style="bold")
    if models.served:
        served = _table("model", "address", "max length", "state")
        for server in models.served:
            served.add_row(
                server.model or "…",
                server.address,
                f"{server.max_model_len:,}" if server.max_model_len else "…",
                server.state,
            )
        console.print(served)
    else:
        console.print(f"no server is running; {START_ONE}")
    console.print("\nCached", style="bold")
    if models.cached:
        cached = _table("name", "weights", "from", "size", "last used")
        newest: dict[tuple[str, str, str], CachedModel] = {}
        for model in models.cached:
            newest.setdefault((model.name, model.weights, model.model), model)
        for model in newest.values():
            weights = model.weights or draw.NONE
            cached.add_row(model.name, weights, model.model, draw.size(model.num_bytes), ago(model.last_used_s))
        console.print(cached)
        if older := len(models.cached) - len(newest):
            console.print(f"and {older} prepared earlier or with other settings; `pipeline cache ls` lists all")
    else:
        console.print("no models")
    console.print("\nSupported", style="bold")
    _print_supported(models.supported, console)


def _print_supported(supported: Sequence[SupportedModels], console: Console) -> None:
    table = _table("architecture", "models", "back ends", "GGUF")
    for kind in supported:
        table.add_row(kind.architecture, kind.models, ", ".join(kind.backends), kind.gguf or draw.NONE)
    console.print(table)


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for heading in headings:
        right = heading in ("size", "last used", "max length")
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
