"""One copy of the weights for models with the same content: a file under two names, in two folders, or copied.

Each entry of the cache keeps the digest of what it was made from. A new entry with the digest of another one gets hard
links to its weights. So each entry is complete by itself, and the weights are on disk until the last one is removed.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.runtime.files.regular_files import read_regular
from pipeline.runtime.model.model_folder import PANELS, STAMP
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.files import open_regular
from pipeline.stages.prepare.progress import Report

CONTENT = "content.txt"
"""The file of an entry with the digest."""
MAX_CONTENT_BYTES = 1024
CHUNK_BYTES = 16 * 1024**2
NOT_LINKABLE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOENT)
"""Errors of file systems without hard links, and of an entry that was just removed."""


def content_of(paths: Sequence[Path], made_as: str, report: Report) -> str:
    """A digest of files and of how they are converted. Reads the files once, on all cores, CHUNK_BYTES at a time each.

    Raises ModelError or OSError if a file can't be read.
    """
    sizes = [path.stat().st_size for path in paths]
    chunks = [(path, begin) for path, size in zip(paths, sizes, strict=True) for begin in range(0, size, CHUNK_BYTES)]
    total = sum(sizes)
    whole = hashlib.blake2b(f"{made_as}|{sizes}".encode(), digest_size=32)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, digest in enumerate(pool.map(_chunk_digest, chunks), 1):
            whole.update(digest)
            report(min(number * CHUNK_BYTES, total), total)
    return whole.hexdigest()


def same_files(paths: Sequence[Path], made_as: str) -> str:
    """The same for files under other names or links to them, without reading them. Raises OSError."""
    stats = [path.stat() for path in paths]
    facts = [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
    return hashlib.blake2b(f"{made_as}|{facts}".encode(), digest_size=32).hexdigest()


def _chunk_digest(location: tuple[Path, int]) -> bytes:
    path, begin = location
    with open_regular(path) as file:
        file.seek(begin)
        return hashlib.blake2b(file.read(CHUNK_BYTES), digest_size=32).digest()


def link_twin(cache: Cache, content: str, folder: Path) -> Path | None:
    """Fill the empty `folder` from a complete entry with the same content: links to its weights, also packed ones, and
    copies of the other files. Returns that entry, None if there is none or the file system has no hard links. Raises
    OSError."""
    return next((twin for twin in _twins(cache, content) if _links(twin, folder)), None)


def copy_of(entry: Path, folder: Path) -> None:
    """Fill the empty `folder` from a complete entry, with links to its weights where the file system has them. Others
    are not linked to it: it may be changed. Raises OSError."""
    if not _links(entry, folder):
        for path in entry.iterdir():
            if _is_model_file(path) and not path.name.startswith(PANELS):  # execute writes these again
                shutil.copyfile(path, folder / path.name)
    (folder / CONTENT).unlink(missing_ok=True)


def _links(entry: Path, folder: Path) -> bool:
    """Fill the empty `folder` with links to an entry's weights and copies of its other files. Returns False, and leaves
    it empty, if that is impossible. Raises OSError."""
    try:
        for path in entry.iterdir():
            if path.suffix == ".safetensors" or path.name.startswith(PANELS):
                os.link(path, folder / path.name)
            elif _is_model_file(path):
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        for path in folder.iterdir():
            path.unlink()
        if error.errno not in NOT_LINKABLE:
            raise
        return False
    return True


def _is_model_file(path: Path) -> bool:
    """Whether it belongs to the model, unlike the stamp and the folder of adapters."""
    return path.name != STAMP and path.is_file()


def _twins(cache: Cache, content: str) -> Iterator[Path]:
    for path in sorted(cache.root.glob(f"model-*/{CONTENT}")):
        try:
            is_same = read_regular(path, MAX_CONTENT_BYTES) == content.encode()
        except OSError:  # removed just now, or damaged
            continue
        if is_same and (twin := cache.lookup(path.parent.name)) is not None:
            yield twin
