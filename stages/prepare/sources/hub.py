"""Downloads a model from the Hugging Face hub: only the files that serving needs, into the hub's own cache.

    id@revision ──model_info──► commit, names ──needed──► snapshot_download ──► HF_HOME/hub/…/snapshots/commit
         └── no network, or HF_HUB_OFFLINE ──► the commit that was downloaded last for this revision

huggingface_hub reads HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Importing this module imports it,
which takes 0.2 s.
"""

import errno
import glob
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from pipeline.stages.prepare.encoders.sentence_transformers import MODULES, configs, extra_files
from pipeline.stages.prepare.files import require_inside, shown
from pipeline.stages.prepare.progress import Progress, Report
from pipeline.stages.prepare.sources.layout import INDEX, NAMED_TEMPLATES, READ_SUFFIXES, SINGLE, shards_of
from pipeline.stages.prepare.sources.source import COMMIT, HubSource, ModelError

CONFIG = "config.json"

OTHER_LAYOUTS = ("consolidated", "adapter_")
"""Name prefixes of safetensors files that are not a model in transformers' layout."""

INFO_TIMEOUT_S = 15.0

UNWRITABLE = (*(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM), errno.ENOTDIR, errno.ENAMETOOLONG)


# Connection errors. Depending on its version, huggingface_hub is built on requests or httpx; the base classes of its
# HTTPError are the roots of either family.
TRANSPORT: tuple[type[Exception], ...] = (
    *(base for base in HfHubHTTPError.__mro__ if base.__name__ in ("HTTPError", "RequestException")),
    ConnectionError,
    TimeoutError,
)
FAILURES: tuple[type[Exception], ...] = (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    LocalEntryNotFoundError,
    HFValidationError,
    *TRANSPORT,
)


OFFLINE_ADVICE = "; models on this machine need no connection: use a folder or a .gguf file as model"


class Snapshot(msgspec.Struct, frozen=True):
    """A commit's files in the cache."""

    folder: Path
    commit: str


def fetch(source: HubSource, progress: Progress, check: Callable[[Path], None]) -> Snapshot:
    """Download the files that the cache lacks. `check` raises ModelError if a config.json is not that of a supported
    model; then nothing else is downloaded. Raises ModelError if the model is not available."""
    if COMMIT.fullmatch(source.revision) and (cached := _cached(source)) is not None and _is_complete(cached.folder):
        return cached  # commits are immutable, so no request is needed
    if constants.HF_HUB_OFFLINE:
        return _cached_or_fail(source, f"HF_HUB_OFFLINE is set, and {source} is not in {constants.HF_HUB_CACHE}")
    try:
        return _fetch(source, progress, check)
    except FAILURES as error:
        words, may_be_cached = _words(error, source)
        if may_be_cached and (cached := _cached(source)) is not None and _is_complete(cached.folder):
            progress.say(f"{words}: using commit {cached.commit[:12]} from the cache")
            return cached
        raise ModelError(words + (OFFLINE_ADVICE if isinstance(error, TRANSPORT) else "")) from error
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise ModelError(
                f"cannot write {constants.HF_HUB_CACHE} ({error.strerror}): set HF_HOME to a folder you can write to, "
                "with room for the model"
            ) from error
        raise ModelError(f"{constants.ENDPOINT} returned an error for {source} ({_first_line(error)})") from error


def _fetch(source: HubSource, progress: Progress, check: Callable[[Path], None]) -> Snapshot:
    info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=INFO_TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise ModelError(f"{constants.ENDPOINT} returned {shown(info.sha)} for {source}, which is not a commit")
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    names = _wanted(source, info.sha, sizes)
    check(Path(hf_hub_download(source.repo, CONFIG, revision=info.sha)))
    missing = [name for name in names if not isinstance(_in_cache(source, name, info.sha), str)]
    num_bytes = sum(sizes[name] for name in missing)
    _require_room(num_bytes)
    with _progress_bar(f"downloading {source} at {info.sha[:12]}", num_bytes, progress) as bar:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=bar,
        )
    return Snapshot(Path(folder), Path(folder).name)


def _wanted(source: HubSource, commit: str, names: Iterable[str]) -> list[str]:
    """The files to download: configs, tokenizer, and one set of weights. Raises ModelError if it isn't a model."""
    names = list(names)
    for name in names:
        require_inside(name, str(source))
    top = [name for name in names if "/" not in name]
    if CONFIG not in top:
        raise ModelError(f"{source} has no {CONFIG}: it is not a model in Hugging Face layout{_others(top)}")
    weights = _weights(source, commit, names, top)
    if not weights:
        raise ModelError(f"{source} has no weights as *.safetensors{_others(top)}")
    read = [name for name in top if name.endswith(READ_SUFFIXES) and not name.endswith(".safetensors")]
    read += [name for name in NAMED_TEMPLATES if name in names]
    if MODULES in top:
        modules = Path(hf_hub_download(source.repo, MODULES, revision=commit))
        read += [name for name in extra_files(modules.parent) if name in names]
    return [*read, *weights]


def _weights(source: HubSource, commit: str, names: list[str], top: list[str]) -> list[str]:
    if SINGLE in top:
        return [SINGLE]
    if INDEX in top:
        path = Path(hf_hub_download(source.repo, INDEX, revision=commit))
        shards = shards_of(path)
        if lost := [name for name in shards if name not in names]:
            raise ModelError(f"{source}: {INDEX} names {lost[0][:200]}, which the repository doesn't have")
        return shards
    return sorted(name for name in top if name.endswith(".safetensors") and not name.startswith(OTHER_LAYOUTS))


def _others(top: list[str]) -> str:
    """A hint about files of the repository that the user may have taken for a supported model."""
    for suffix, advice in (
        (".gguf", "download a .gguf file and use its path as model"),
        (".bin", "save the model again with save_pretrained(), which writes safetensors"),
        (".pth", "look for a repository that was converted to Hugging Face layout"),
        (".safetensors", "it may be an adapter, or weights in another layout"),
    ):
        if found := sorted(name for name in top if name.endswith(suffix)):
            return f". It has {found[0]}: {advice}"
    return ""


def _cached(source: HubSource) -> Snapshot | None:
    """The commit that was downloaded last for a revision."""
    path = _in_cache(source, CONFIG, source.revision)
    return Snapshot(Path(path).parent, Path(path).parent.name) if isinstance(path, str) else None


def _in_cache(source: HubSource, name: str, revision: str) -> Any:
    try:
        return try_to_load_from_cache(source.repo, name, revision=revision)
    except HFValidationError as error:
        raise ModelError(f"model {source}: {_first_line(error)}") from error


def _cached_or_fail(source: HubSource, words: str) -> Snapshot:
    cached = _cached(source)
    if cached is None:
        raise ModelError(f"{words}: download it once while online, or use a folder as model")
    if not _is_complete(cached.folder):
        raise ModelError(f"{words} completely, only in part ({cached.folder}): download it once while online")
    return cached


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has all weights and a tokenizer. Their contents are checked when they are read."""
    index = folder / INDEX
    if index.is_file() and not (folder / SINGLE).is_file():
        try:
            weights = [folder / name for name in shards_of(index)]
        except ModelError:
            return False
    else:
        weights = list(folder.glob("*.safetensors")) or [folder / SINGLE]
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return has_tokenizer and all(path.is_file() for path in weights) and _has_modules(folder)


def _has_modules(folder: Path) -> bool:
    """Whether a snapshot has the configurations that its modules.json names, if it has that file."""
    try:
        return all((folder / name).is_file() for name in configs(folder))
    except ModelError:
        return True  # reported when it is read


def _words(error: Exception, source: HubSource) -> tuple[str, bool]:
    """The user's message for an error of the hub, and whether a cached copy may be used instead."""
    where = constants.ENDPOINT
    match error:
        case GatedRepoError():
            has_token = "the current token has no access" if get_token() else "no token is set"
            return (
                f"{source} is gated: accept its terms at {where}/{source.repo}, and set HF_TOKEN to a token with read "
                f"access ({has_token})"
            ), True
        case RevisionNotFoundError():
            return f"{source.repo} has no revision {source.revision!r} on {where}: check the part after '@'", False
        case DisabledRepoError():
            return f"{source} was disabled on {where}", True
        case RepositoryNotFoundError():
            return (
                f"{where} has no model {source.repo}, or it is private: check the name, or set HF_TOKEN to a token "
                "with read access"
            ), True
        case HFValidationError():
            return f"model {source}: {_first_line(error)}", False
        case HfHubHTTPError() if (status := getattr(error.response, "status_code", None)) in (401, 403):
            return f"{where} refused the token in HF_TOKEN for {source} ({status})", True
        case HfHubHTTPError():
            return f"{where} returned an error for {source} ({_first_line(error)})", True
        case _:
            cause = error.__cause__ or error
            return f"cannot download {source}: {where} is not reachable ({_first_line(cause)})", True


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def _require_room(num_bytes: int) -> None:
    """Raises ModelError where the disk of the hub's cache can't take so much more."""
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ModelError(
            f"downloading the model needs {num_bytes / 1024**2:.0f} MiB in {cache}, but only "
            f"{free / 1024**2:.0f} MiB are free: free disk space, or set HF_HOME"
        )


@contextmanager
def _progress_bar(what: str, num_bytes: int, progress: Progress) -> Iterator[type["tqdm[Any]"]]:
    """A tqdm class for huggingface_hub that draws nothing and reports bytes to `progress`, if there are any."""
    if not num_bytes:
        yield _bar_class(lambda done, total: None, 0)
        return
    with progress.measure(what) as report:
        yield _bar_class(report, num_bytes)
        report(num_bytes, num_bytes)


class _NullFile:
    """A file that discards what a bar draws."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _bar_class(report: Report, num_bytes: int) -> type["tqdm[Any]"]:
    null_file = _NullFile()

    class HubProgressBar(tqdm):  # type: ignore[misc]  # it has no types
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": null_file, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B":  # other bars count files
                report(min(int(self.n), num_bytes), num_bytes)
            return shown

    return HubProgressBar
