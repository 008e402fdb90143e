"""A model given by a name: that which `pipeline models` lists it with, for what it was prepared from, or a well-known
one."""

from itertools import islice
from pathlib import Path

import msgspec

from pipeline.config.closest import closest
from pipeline.config.settings import Settings
from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import MAX_STAMP_BYTES, STAMP
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.sources import library
from pipeline.stages.prepare.sources.source import (
    FORMS,
    HubSource,
    ModelError,
    NoSuchModel,
    Source,
    is_folder,
    parse,
    shown_model,
)

MAX_ENTRIES = 4096


class Stamp(msgspec.Struct, frozen=True):
    """What an entry of the cache says of itself."""

    source: str = ""


def source_of(model: str, root: Path) -> Source:
    """`parse`, which also takes the name of a model that was prepared in the cache at `root`, and the well-known names
    of library.toml. Raises ModelError."""
    try:
        return parse(model)
    except NoSuchModel as error:
        known = _sources(root)
        if not (sources := sorted(known.get(model, ()))):
            if (repo := library.find(model)) is not None:
                return parse(repo)
            near = closest(model, (*known, *library.names())) or _closest_path(model)
            if not near:
                raise
            raise ModelError(
                f"model {shown_model(model)}: no such folder or file{near} `pipeline models` lists what is cached; "
                f"otherwise use {FORMS}"
            ) from error
        if len(sources) > 1:
            raise ModelError(
                f"{len(sources)} models of the cache have the name {model}: give one of {', '.join(sources[:10])}"
            ) from error
        try:
            return parse(sources[0])
        except ModelError as gone:
            raise ModelError(f"{model} was prepared from {sources[0]}, which can't be used now: {gone}") from gone


def given_name(settings: Settings) -> str:
    """The well-known name that `settings.model` is, which is then the model's name for clients; empty for others."""
    model = settings.model
    if "/" in model or model.startswith("wheel:") or library.find(model) is None:
        return ""
    return model if isinstance(source_of(model, Cache.of(settings).root), HubSource) else ""


def _closest_path(model: str) -> str:
    """A folder or file beside the missing one with nearly its name."""
    path = Path(model)
    try:
        beside = list(islice(path.expanduser().parent.iterdir(), MAX_ENTRIES))
    except (OSError, RuntimeError):
        return ""
    return closest(path.name, [one.name for one in beside if one.suffix.lower() == ".gguf" or is_folder(one)])


def _sources(root: Path) -> dict[str, set[str]]:
    """The names of prepared models, each with what they were prepared from."""
    found: dict[str, set[str]] = {}
    wheels = {str(path): _stamp(path).source for path in _entries(root, "wheel-")}
    for path in _entries(root, "model-"):
        source = _stamp(path).source
        try:
            name = ModelConfig.load(path).name
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # of another version, or removed just now
        wheel = next((wheels[one] for one in wheels if Path(source).is_relative_to(one)), None)
        if source and " with " not in source:  # those with another chat template have the name of their model
            found.setdefault(name, set()).add(wheel or source)
    return found


def _entries(root: Path, prefix: str) -> list[Path]:
    try:
        return [path for path in islice(root.iterdir(), MAX_ENTRIES) if path.name.startswith(prefix)]
    except OSError:
        return []


def _stamp(folder: Path) -> Stamp:
    try:
        return msgspec.json.decode(read_regular(folder / STAMP, MAX_STAMP_BYTES), type=Stamp)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Stamp()
