"""The hub's cache on this machine, as huggingface_hub and other programs keep it, read without huggingface_hub:

HF_HUB_CACHE/models--ORG--NAME/refs/REVISION                the commit
                              /snapshots/COMMIT/FILE   ->   ../../blobs/ETAG
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.stages.prepare.files import require_inside
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.hub import quantizations
from pipeline.stages.prepare.sources.layout import INDEX, SINGLE, shards_of
from pipeline.stages.prepare.sources.source import COMMIT, HubSource, ModelError, is_file, is_folder

CONFIG = "config.json"
MODULES = "modules.json"
"""The file that a sentence-transformers model has."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TRUE = ("1", "on", "yes", "true")
"""Values of the hub's environment variables, as huggingface_hub reads them."""


class Snapshot(msgspec.Struct, frozen=True):
    """A commit's files in the cache: a folder in Hugging Face layout, or the parts of a .gguf model."""

    folder: Path
    commit: str
    ggufs: list[Path] = []  # msgspec copies a struct's empty defaults
    """Empty if the folder is the model."""
    quantization: str = ""
    """Of the .gguf model, if its name has one."""
    projector: Path | None = None
    """The file of its vision tower."""


def cache_folder() -> Path:
    """HF_HUB_CACHE, or its default."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    path = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(path)).expanduser()


def is_offline() -> bool:
    """Whether the environment forbids to use the network for models."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in TRUE


def repositories() -> list[Path]:
    """The folders of all repositories that hold files, whichever program has downloaded them. Raises OSError if the
    cache can't be read."""
    root = cache_folder()
    folders = [path for path in root.iterdir() if path.name.startswith("models--")] if root.is_dir() else []
    return sorted(path for path in folders if any(path.glob("snapshots/*/*")) or any(path.glob("blobs/*.incomplete")))


def remove(storage: Path) -> None:
    """Remove a repository and its locks. Raises OSError."""
    storage.rename(gone := storage.with_name(f".removed-{storage.name}-{os.getpid()}"))
    shutil.rmtree(gone)
    shutil.rmtree(storage.parent / ".locks" / storage.name, ignore_errors=True)


def storage_of(repo: str) -> Path:
    """The folder of a repository."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find(source: HubSource) -> Snapshot | None:
    """The model of the commit that was downloaded last for a revision, if all its files are there. Raises ModelError if
    the revision is no name of one."""
    snapshot = snapshot_of(source)
    if snapshot is None:
        return None
    folder = snapshot.folder
    if not source.file and not source.quantization and _is_complete(folder):
        return snapshot
    names = _ggufs_in(folder)
    models = quantizations.models_of(names)
    if not models:
        return None
    try:
        first = quantizations.choose(source, models)
        parts = [folder / name for name in quantizations.parts_of(first, names)]
    except ModelError:
        return None  # the repository may have it
    projector = quantizations.projector_of(first, names)
    return Snapshot(folder, snapshot.commit, parts, models[first], folder / projector if projector else None)


def find_or_fetch(source: HubSource, progress: Progress, check: Callable[[Path], None], timeout_s: float) -> Snapshot:
    """The model from the cache, without a request, or else from the hub. Raises ModelError as `fetch.fetch` does."""
    found_in = "the cache"
    if (found := find(source)) is None:
        require_online(source)
        from pipeline.stages.prepare.sources.hub.fetch import fetch  # imports huggingface_hub

        found, found_in = fetch(source, progress, check, timeout_s), "the repository"
    if (line := which(source, found, found_in)) is not None:
        progress.say(line)
    return found


def which(source: HubSource, found: Snapshot, found_in: str) -> str | None:
    """A line that says which .gguf model was taken, if the user may expect another one."""
    is_expected = source.file or source.quantization or found.quantization == quantizations.DEFAULT
    if not found.ggufs or is_expected:
        return None
    taken = found.quantization or found.ggufs[0].name
    return f"{source}: using {taken}, as {found_in} has no {quantizations.DEFAULT} of it"


def source_of_snapshot(source: HubSource, found: Snapshot) -> HubSource:
    """The source, with the quantization that was taken if it names none."""
    if source.file or not found.ggufs:
        return source
    return msgspec.structs.replace(source, quantization=found.quantization)


def require_online(source: HubSource) -> None:
    """Raises ModelError, naming what the cache lacks, if the environment forbids to ask the hub."""
    if not is_offline():
        return
    where = f"HF_HUB_OFFLINE or --offline is set, and {source} is not in {cache_folder()}"
    if (part := snapshot_of(source)) is not None:
        where += f" completely, only in part ({part.folder})"
    raise ModelError(f"{where}: download it once while online, or use a folder as model")


def snapshot_of(source: HubSource) -> Snapshot | None:
    """The folder of a revision's commit, complete or not."""
    storage, commit = storage_of(source.repo), source.revision
    if not COMMIT.fullmatch(commit):
        require_inside(source.revision, str(source))
        try:
            commit = (storage / "refs" / source.revision).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    folder = storage / "snapshots" / commit
    return Snapshot(folder, commit) if COMMIT.fullmatch(commit) and is_folder(folder) else None


def _ggufs_in(folder: Path) -> list[str]:
    """The .gguf files below a snapshot, without links that lead nowhere."""
    found = []
    for parent, _, names in os.walk(folder):
        paths = (Path(parent) / name for name in names if name.lower().endswith(".gguf"))
        found += [str(path.relative_to(folder)) for path in paths if is_file(path)]
    return found


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has the configuration, all weights and a tokenizer. Their contents are checked when they are
    read."""
    index = folder / INDEX
    if index.is_file() and not (folder / SINGLE).is_file():
        try:
            weights = [folder / name for name in shards_of(index)]
        except ModelError:
            return False
    else:
        weights = list(folder.glob("*.safetensors")) or [folder / SINGLE]
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    has_weights = has_tokenizer and all(path.is_file() for path in weights)
    return has_weights and (folder / CONFIG).is_file() and _has_modules(folder)


def _has_modules(folder: Path) -> bool:
    """Whether a snapshot has the configurations that its modules.json names, if it has that file."""
    if not (folder / MODULES).is_file():
        return True
    from pipeline.stages.prepare.encoders.sentence_transformers import configs  # imports more than a warm start needs

    try:
        return all((folder / name).is_file() for name in configs(folder))
    except ModelError:
        return True  # reported when it is read
