"""A model of the Hugging Face hub: the files of one commit that are needed to serve it, in the hub's own cache.

    id@revision ──model_info──► commit, names ──those we read──► snapshot_download ──► HF_HOME/hub/…/snapshots/commit
         └── no network, or HF_HUB_OFFLINE ──► the commit that was fetched last for this revision

HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub, which reads
them. Importing this module loads it: a fifth of a second that only hub ids pay for.
"""

import errno
import glob
import shutil
from collections.abc import Iterable, Iterator
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

from pipeline.stages.prepare.files import require_inside, shown
from pipeline.stages.prepare.progress import Progress, Report
from pipeline.stages.prepare.sources.layout import INDEX, READ_SUFFIXES, TOOL_TEMPLATE, shards_of
from pipeline.stages.prepare.sources.source import COMMIT, HubSource, ModelError

SINGLE = "model.safetensors"
CONFIG = "config.json"

OTHER_LAYOUTS = ("consolidated", "adapter_")
"""Beginnings of names of safetensors files that are not a model in transformers' layout."""

INFO_TIMEOUT_S = 15.0

UNWRITABLE = (*(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM), errno.ENOTDIR, errno.ENAMETOOLONG)


# Errors of the connection itself: huggingface_hub's HTTPError is that of whichever client it is built on, and these are
# the roots of its family and of the standard library's.
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


class Snapshot(msgspec.Struct, frozen=True):
    """A commit's files on this machine."""

    folder: Path
    commit: str


def fetch(source: HubSource, progress: Progress) -> Snapshot:
    """Fetch what is not there yet. Raises ModelError, in one line for the user, where the model can't be had."""
    if COMMIT.fullmatch(source.revision) and (cached := _cached(source)) is not None and _is_complete(cached.folder):
        return cached  # a commit never changes, so there is nothing to ask
    if constants.HF_HUB_OFFLINE:
        return _cached_or_fail(source, f"HF_HUB_OFFLINE is set, and {source} is not in {constants.HF_HUB_CACHE}")
    try:
        return _fetch(source, progress)
    except FAILURES as error:
        words, may_be_cached = _words(error, source)
        if may_be_cached and (cached := _cached(source)) is not None and _is_complete(cached.folder):
            progress.say(f"{words}: taking commit {cached.commit[:12]}, fetched before")
            return cached
        raise ModelError(words) from error
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise ModelError(
                f"cannot write {constants.HF_HUB_CACHE} ({error.strerror}): set HF_HOME to a folder you can write to, "
                "with room for the model"
            ) from error
        raise ModelError(f"{constants.ENDPOINT} could not answer for {source} ({_first_line(error)})") from error


def _fetch(source: HubSource, progress: Progress) -> Snapshot:
    info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=INFO_TIMEOUT_S)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise ModelError(f"{constants.ENDPOINT} names no commit for {source}, but {shown(info.sha)}")
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    names = _wanted(source, info.sha, sizes)
    missing = [name for name in names if not isinstance(_in_cache(source, name, info.sha), str)]
    num_bytes = sum(sizes[name] for name in missing)
    _require_room(num_bytes)
    with _told(f"fetching {source} at {info.sha[:12]}", num_bytes, progress) as bar:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=bar,
        )
    return Snapshot(Path(folder), Path(folder).name)


def _wanted(source: HubSource, commit: str, names: Iterable[str]) -> list[str]:
    """Which files to fetch: configs and tokenizer, and one set of weights. Raises ModelError where it is no model."""
    names = list(names)
    for name in names:
        require_inside(name, str(source))
    top = [name for name in names if "/" not in name]
    if CONFIG not in top:
        raise ModelError(f"{source} has no {CONFIG}: it is not a model in Hugging Face layout{_others(top)}")
    weights = _weights(source, commit, names, top)
    if not weights:
        raise ModelError(f"{source} has no weights as *.safetensors, which is what is read{_others(top)}")
    read = [name for name in top if name.endswith(READ_SUFFIXES) and not name.endswith(".safetensors")]
    if TOOL_TEMPLATE in names:
        read.append(TOOL_TEMPLATE)
    return [*read, *weights]


def _weights(source: HubSource, commit: str, names: list[str], top: list[str]) -> list[str]:
    if INDEX in top:
        path = Path(hf_hub_download(source.repo, INDEX, revision=commit))
        shards = shards_of(path)
        if lost := [name for name in shards if name not in names]:
            raise ModelError(f"{source}: {INDEX} names {lost[0][:200]}, which the repository doesn't have")
        return shards
    if SINGLE in top:
        return [SINGLE]
    return sorted(name for name in top if name.endswith(".safetensors") and not name.startswith(OTHER_LAYOUTS))


def _others(top: list[str]) -> str:
    """What a repository has that people may have taken for a model of ours."""
    for suffix, advice in (
        (".gguf", "download the .gguf file that you want and give its path"),
        (".bin", "save it again with save_pretrained(), which writes safetensors"),
        (".pth", "look for one that was converted to Hugging Face layout"),
        (".safetensors", "it may be an adapter, or weights in another layout"),
    ):
        if found := sorted(name for name in top if name.endswith(suffix)):
            return f". It has {found[0]}: {advice}"
    return ""


def _cached(source: HubSource) -> Snapshot | None:
    """What was fetched last for a revision."""
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
        raise ModelError(f"{words}: fetch it once with a connection, or give a folder")
    if not _is_complete(cached.folder):
        raise ModelError(f"{words} as a whole, but in parts ({cached.folder}): fetch it once with a connection")
    return cached


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has all weights and a tokenizer. What is wrong with them is told when they are read."""
    index = folder / INDEX
    if index.is_file():
        try:
            weights = [folder / name for name in shards_of(index)]
        except ModelError:
            return False
    else:
        weights = list(folder.glob("*.safetensors")) or [folder / SINGLE]
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return has_tokenizer and all(path.is_file() for path in weights)


def _words(error: Exception, source: HubSource) -> tuple[str, bool]:
    """An error of the hub in words for the user, and whether a copy from before is as good as what was asked for."""
    where = constants.ENDPOINT
    match error:
        case GatedRepoError():
            has_token = "the one that is set has no access" if get_token() else "none is set"
            return (
                f"{source} is gated: accept its terms at {where}/{source.repo}, and put a token that may read it into "
                f"HF_TOKEN ({has_token})"
            ), True
        case RevisionNotFoundError():
            return f"{source.repo} has no revision {source.revision!r} on {where}: check the part after '@'", False
        case DisabledRepoError():
            return f"{source} was disabled on {where}", True
        case RepositoryNotFoundError():
            return (
                f"{where} has no model {source.repo}, or it is private: check the name, or put a token that may read "
                "it into HF_TOKEN"
            ), True
        case HFValidationError():
            return f"model {source}: {_first_line(error)}", False
        case HfHubHTTPError() if (status := getattr(error.response, "status_code", None)) in (401, 403):
            return f"{where} refused the token in HF_TOKEN for {source} ({status})", True
        case HfHubHTTPError():
            return f"{where} could not answer for {source} ({_first_line(error)})", True
        case _:
            cause = error.__cause__ or error
            return f"{source} can't be fetched: {where} can't be reached ({_first_line(cause)})", True


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
            f"fetching the model needs {num_bytes / 1024**2:.0f} MiB in {cache}, where {free / 1024**2:.0f} MiB are "
            "free: make room, or set HF_HOME"
        )


@contextmanager
def _told(what: str, num_bytes: int, progress: Progress) -> Iterator[type["tqdm[Any]"]]:
    """A bar for huggingface_hub that draws nothing and reports bytes to `progress`; nothing where there are none."""
    if not num_bytes:
        yield _bar(lambda done, total: None, 0)
        return
    with progress.measure(what) as report:
        yield _bar(report, num_bytes)
        report(num_bytes, num_bytes)


class _Nowhere:
    """Where a bar is drawn that nobody is to see."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _bar(report: Report, num_bytes: int) -> type["tqdm[Any]"]:
    nowhere = _Nowhere()

    class HubProgressBar(tqdm):  # type: ignore[misc]  # it has no types
        monitor_interval = 0  # no thread that wakes up for a bar

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": nowhere, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B":  # other bars count files, or the same bytes once more
                report(min(int(self.n), num_bytes), num_bytes)
            return shown

    return HubProgressBar
