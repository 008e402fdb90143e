"""The entries of the cache on disk. See stages/prepare/cache.py for its layout."""

import importlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeline.cli.server_choice import look
from pipeline.config.settings import Settings
from pipeline.own_files import OpenFolder
from pipeline.runtime.files.cache_path import CRASHES
from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.model.draft_link import DRAFTS
from pipeline.runtime.model.model_folder import MAX_STAMP_BYTES, STAMP, is_held, is_locked
from pipeline.supervisor.admin.admin_client import find_servers

CACHE = "pipeline.stages.prepare.cache"
"""The module with `Cache`, imported by name as by the other commands."""
HUB = "pipeline.stages.prepare.sources.hub.local"
"""The module that knows the hub's cache."""

Kind = Literal["model", "wheel", "hub", "kernels", "crashes", "unfinished", "other"]
KERNELS = re.compile(r"kernels(-\d+)?")
"""Folders of libraries; see pipeline/own_files.py."""
REPORTS = re.compile(rf"{CRASHES}(-\d+)?")
"""Folders of crash reports."""
PARTIAL = ".partial-"


class Entry(msgspec.Struct, frozen=True):
    """A folder in the cache, a compiled library with its log, or a crash report."""

    name: str
    kind: Kind
    path: str
    num_bytes: int
    last_used_s: float
    """Unix time."""
    source: str
    """What it was made from; empty if unknown."""
    in_use: bool
    """Whether a running server, or a process that is filling it, uses it."""

    @property
    def can_be_removed(self) -> bool:
        return not self.in_use and self.kind != "other"


class Stamp(msgspec.Struct, frozen=True):
    """What `complete.json` says."""

    source: str = ""


def root_of(settings: Settings) -> Path:
    """The cache's folder. Raises UserError if it can't be determined."""
    root: Path = importlib.import_module(CACHE).Cache.of(settings).root
    return root


def entries_of(root: Path) -> list[Entry]:
    """All entries, the largest first. Raises OSError if the folder exists and can't be read."""
    if not root.is_dir():
        return []
    starting_s = _starting_since()
    found = [entry for path in root.iterdir() for entry in _read(path, starting_s)]
    models = [entry for entry in found if entry.kind == "model" and entry.in_use]
    # A model of a .gguf file in a wheel is prepared again from the wheel's folder if a setting changes.
    found = [
        msgspec.structs.replace(one, in_use=True)
        if one.kind == "wheel" and any(Path(model.source).is_relative_to(one.path) for model in models)
        else one
        for one in found
    ]
    return sorted(found, key=lambda one: (-one.num_bytes, one.name))


def hub_entries(entries: Iterable[Entry]) -> list[Entry]:
    """The models in the hub's own cache, which other programs use too. One is in use if one of `entries` is that was
    made of it. Raises OSError if the cache can't be read."""
    local: Any = importlib.import_module(HUB)
    used = {repository_of(entry.source) for entry in entries if entry.kind == "model" and entry.in_use}
    found = []
    for path in local.repositories():
        repo = path.name.removeprefix("models--").replace("--", "/", 1)
        found.append(Entry(repo, "hub", str(path), _size(path), path.stat().st_mtime, repo, repo in used))
    return found


def repository_of(source: str) -> str:
    """The repository of a hub id, which may name a quantization, a file or a revision."""
    return "/".join(re.split("[:@]", source)[0].split("/")[:2])


def remove(root: Path, entry: Entry) -> bool:
    """Remove an entry. Returns False if it is used by now. Raises OSError."""
    if entry.kind == "kernels":
        library = Path(entry.path)
        with OpenFolder(library.parent) as folder:  # another user may swap its own for a link
            (folder.path / library.name).unlink(missing_ok=True)
            (folder.path / library.name).with_suffix(".log").unlink(missing_ok=True)
        return True
    if entry.kind == "crashes":
        with OpenFolder(Path(entry.path).parent) as folder:
            shutil.rmtree(entry.name, dir_fd=folder.fd)
        return True
    if entry.kind == "hub":
        importlib.import_module(HUB).remove(Path(entry.path))
        return True
    cache: Any = importlib.import_module(CACHE).Cache(root)
    removed: bool = cache.remove(entry.name.removeprefix(PARTIAL))
    return removed


def _read(path: Path, starting_s: float) -> Iterator[Entry]:
    try:
        if KERNELS.fullmatch(path.name):
            with suppress(PermissionError):  # another user's
                yield from _kernels(path)
        elif REPORTS.fullmatch(path.name) and path.is_dir():
            with suppress(PermissionError):
                yield from _crashes(path)
        elif path.is_dir() and path.name != DRAFTS:
            yield _folder(path, starting_s)
    except FileNotFoundError:
        pass  # removed just now


def _folder(path: Path, starting_s: float) -> Entry:
    used_s = path.stat().st_mtime
    kind: Kind = "other"
    in_use = False
    if path.name.startswith(PARTIAL):
        kind = "unfinished"
        in_use = is_locked(path.with_name(f".lock-{path.name.removeprefix(PARTIAL)}"))
    elif (path / STAMP).is_file():
        kind = "model" if path.name.startswith("model-") else "wheel" if path.name.startswith("wheel-") else "other"
        in_use = kind != "other" and (is_held(path) or used_s >= starting_s)
    return Entry(path.name, kind, str(path), _size(path), used_s, _source(path), in_use)


def _kernels(folder: Path) -> Iterator[Entry]:
    mapped = _mapped_files()
    for path in sorted({path.with_suffix(".so") for path in folder.iterdir() if path.suffix in (".so", ".log")}):
        files = [one.stat() for one in (path, path.with_suffix(".log")) if one.exists()]
        num_bytes, used_s = sum(one.st_size for one in files), max((one.st_mtime for one in files), default=0.0)
        yield Entry(path.stem, "kernels", str(path), num_bytes, used_s, "", os.path.realpath(path) in mapped)


def _crashes(folder: Path) -> Iterator[Entry]:
    """The crash reports, which nothing uses."""
    for path in sorted(one for one in folder.iterdir() if one.is_dir()):
        yield Entry(path.name, "crashes", str(path), _size(path), path.stat().st_mtime, "", False)


def _source(folder: Path) -> str:
    try:
        return msgspec.json.decode(read_regular(folder / STAMP, MAX_STAMP_BYTES), type=Stamp).source
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def disk_bytes(entries: Iterable[Entry]) -> int:
    """Bytes that entries take on disk; files that several of them share (hard links) count once."""
    return sum({key: size for entry in entries for key, size in _files(entry).items()}.values())


def _files(entry: Entry) -> dict[tuple[int, int] | str, int]:
    """Sizes of an entry's files, by device and inode."""
    if entry.kind == "kernels":  # two files, without links
        return {entry.path: entry.num_bytes}
    found: dict[tuple[int, int] | str, int] = {}
    for parent, _, names in os.walk(entry.path):
        for name in names:
            with suppress(FileNotFoundError):
                stat = (Path(parent) / name).lstat()
                found[stat.st_dev, stat.st_ino] = stat.st_size
    return found


def _mapped_files() -> set[str]:
    """Files that this user's processes have in their memory, as loaded libraries are."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # another user's process, or one that has just ended
            continue
        found.update(line[line.index("/") :] for line in lines if ".so" in line and "/" in line)
    return found


def _starting_since() -> float:
    """When the oldest of the servers that are starting was started; what was used after that, they may be about to
    load. Infinity if none is starting."""
    servers, _ = look(find_servers())
    ages_s = [server.uptime_s for server in servers if server.state == "starting"]
    return time.time() - max(ages_s) if ages_s else float("inf")
