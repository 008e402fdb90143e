"""Downloads a model from the Hugging Face hub: only the files that serving needs, into the hub's own cache.

    id@revision ──model_info──► commit, files ──chosen──► blobs ──► HF_HUB_CACHE/models--ORG--NAME/snapshots/COMMIT

huggingface_hub reads HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_ENDPOINT. Importing this module imports it, which takes
0.2 s.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from pipeline.stages.prepare.encoders.sentence_transformers import MODULES, extra_files
from pipeline.stages.prepare.files import require_inside, shown
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.progress import Progress, SilentProgress
from pipeline.stages.prepare.sources.hub import quantizations
from pipeline.stages.prepare.sources.hub.download import RemoteFile, download, is_linked, left_bytes, remember
from pipeline.stages.prepare.sources.hub.failures import reported
from pipeline.stages.prepare.sources.hub.local import CONFIG, Snapshot, cache_folder, storage_of
from pipeline.stages.prepare.sources.hub.retries import patiently, without_secrets
from pipeline.stages.prepare.sources.layout import INDEX, NAMED_TEMPLATES, READ_SUFFIXES, SINGLE, shards_of
from pipeline.stages.prepare.sources.source import COMMIT, HubSource, ModelError

OTHER_LAYOUTS = ("consolidated", "adapter_")
"""Name prefixes of safetensors files that are not a model in transformers' layout."""

INFO_TIMEOUT_S = 15.0


def fetch(source: HubSource, progress: Progress, check: Callable[[Path], None], timeout_s: float) -> Snapshot:
    """Download what the cache lacks of the revision's current commit. `check` raises ModelError if a config.json is not
    that of a supported model; then nothing else is downloaded. Raises ModelError if the model is not available, or if
    another process holds one of its files for `timeout_s`."""
    found: list[Snapshot] = []
    reported(source, lambda: found.append(_fetch(source, progress, check, timeout_s)))
    return found[0]


def _fetch(source: HubSource, progress: Progress, check: Callable[[Path], None], timeout_s: float) -> Snapshot:
    repository = _Repository(source, progress, timeout_s)
    names = repository.names
    models = quantizations.models_of(names)
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    if source.file or source.quantization or (models and not has_safetensors):
        first = quantizations.choose(source, models)
        parts = quantizations.parts_of(first, names)
        _require_architecture(repository.info, source)
        projector = quantizations.projector_of(first, names)
        repository.get([*parts, *([projector] if projector else [])])
        found = Snapshot(
            repository.folder,
            repository.commit,
            [repository.folder / name for name in parts],
            models[first],
            repository.folder / projector if projector else None,
        )
    else:
        names = _wanted(source, names, repository.get_small)
        check(repository.get_small(CONFIG))
        repository.get(names)
        found = Snapshot(repository.folder, repository.commit)
    remember(repository.storage, source.revision, repository.commit)
    return found


class _Repository:
    """A repository at the current commit of a revision."""

    def __init__(self, source: HubSource, progress: Progress, timeout_s: float) -> None:
        """Asks the hub. Raises ModelError if its answer makes no sense, and huggingface_hub's errors."""
        self._source, self._progress, self._timeout_s = source, progress, timeout_s

        def ask() -> ModelInfo:
            return HfApi().model_info(
                source.repo, revision=source.revision, files_metadata=True, timeout=INFO_TIMEOUT_S
            )

        self.info = patiently(f"asking for {source}", progress.say, ask)
        if self.info.sha is None or not COMMIT.fullmatch(self.info.sha):
            hub = without_secrets(constants.ENDPOINT)
            raise ModelError(f"{hub} returned {shown(self.info.sha)} for {source}, which is no commit")
        self.commit = self.info.sha
        self._siblings = {sibling.rfilename: sibling for sibling in self.info.siblings or []}
        for name in self._siblings:
            require_inside(name, str(source))
        self.names = list(self._siblings)
        self.storage = storage_of(source.repo)
        self.folder = self.storage / "snapshots" / self.commit

    def get(self, names: Sequence[str]) -> None:
        """Download those files that the cache lacks. Raises ModelError, OSError, and huggingface_hub's errors."""
        files = [self._remote(name) for name in names if not is_linked(self.storage, self.commit, name)]
        _require_room(left_bytes(files, self.storage))
        what = f"downloading {self._source} at {self.commit[:12]}"
        download(files, self.storage, what, self._progress, self._timeout_s)

    def get_small(self, name: str) -> Path:
        """Download a file, without a word of progress, unless the cache has it. Raises as `get` does."""
        if not is_linked(self.storage, self.commit, name):
            download([self._remote(name)], self.storage, name, SilentProgress(), self._timeout_s)
        return self.folder / name

    def _remote(self, name: str) -> RemoteFile:
        """Where a file is, how large, and its digest: as the list of files says, or else as the file's own head."""
        url = hf_hub_url(self._source.repo, name, revision=self.commit)
        sibling = self._siblings[name]
        etag, size = _etag(sibling), sibling.size
        if etag is None or size is None:
            head = patiently(f"asking for {name}", self._progress.say, lambda: get_hf_file_metadata(url))
            etag, size = head.etag or "", head.size
        if size is None:
            raise ModelError(f"{without_secrets(constants.ENDPOINT)} doesn't say how large {name} of {self._source} is")
        return RemoteFile(self._source.repo, self.commit, name, url, etag, size)


def _etag(sibling: RepoSibling) -> str | None:
    """The name of a file in the cache, if the list of files has it."""
    return sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id


def _wanted(source: HubSource, names: Sequence[str], get: Callable[[str], Path]) -> list[str]:
    """The files to download: configs, tokenizer, and one set of weights. `get` downloads a small file that says which.
    Raises ModelError if it isn't a model."""
    top = [name for name in names if "/" not in name]
    if CONFIG not in top:
        raise ModelError(f"{source} has no {CONFIG}: it is not a model in Hugging Face layout{_others(top)}")
    weights = _weights(source, names, top, get)
    if not weights:
        raise ModelError(f"{source} has no weights as *.safetensors{_others(top)}")
    read = [name for name in top if name.endswith(READ_SUFFIXES) and not name.endswith(".safetensors")]
    read += [name for name in NAMED_TEMPLATES if name in names]
    if MODULES in top:
        read += [name for name in extra_files(get(MODULES).parent) if name in names]
    return [*read, *weights]


def _weights(source: HubSource, names: Sequence[str], top: list[str], get: Callable[[str], Path]) -> list[str]:
    if SINGLE in top:
        return [SINGLE]
    if INDEX in top:
        shards = shards_of(get(INDEX))
        if lost := [name for name in shards if name not in names]:
            raise ModelError(f"{source}: {INDEX} names {lost[0][:200]}, which the repository doesn't have")
        return shards
    return sorted(name for name in top if name.endswith(".safetensors") and not name.startswith(OTHER_LAYOUTS))


def _others(top: list[str]) -> str:
    """A hint about files of the repository that the user may have taken for a supported model."""
    for suffix, advice in (
        (".bin", "save the model again with save_pretrained(), which writes safetensors"),
        (".pth", "look for a repository that was converted to Hugging Face layout"),
        (".safetensors", "it may be an adapter, or weights in another layout"),
    ):
        if found := sorted(name for name in top if name.endswith(suffix)):
            return f". It has {found[0]}: {advice}"
    return ""


def _require_architecture(info: ModelInfo, source: HubSource) -> None:
    """Raises ModelError if the hub says that the repository's .gguf files have an architecture that is not
    supported."""
    architecture = info.gguf.get("architecture") if isinstance(info.gguf, dict) else None
    if isinstance(architecture, str) and architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{source}: general.architecture is {shown(architecture)}, which is not supported; `pipeline models "
            "--supported` lists those that are"
        )


def _require_room(num_bytes: int) -> None:
    """Raises ModelError where the disk of the hub's cache can't take so much more."""
    cache = cache_folder()
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ModelError(
            f"downloading the model needs {num_bytes / 1024**2:.0f} MiB in {cache}, but only "
            f"{free / 1024**2:.0f} MiB are free: free disk space, or set HF_HOME"
        )
