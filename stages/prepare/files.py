"""Reads a model's files, which are untrusted: only regular files inside the model's folder, up to a size limit.

Links must stay inside the folder. The links of the Hugging Face cache are the only exception:

    models--ORG--NAME/snapshots/COMMIT/config.json  ->  ../../blobs/HASH
"""

import codecs
import errno
import os
import reprlib
import stat
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

import msgspec

from pipeline.runtime.files import regular_files
from pipeline.stages.prepare.sources.source import ModelError

T = TypeVar("T")

MAX_JSON_BYTES = 16 * 1024**2
"""config.json, generation_config.json, tokenizer_config.json."""
MAX_INDEX_BYTES = 64 * 1024**2
"""model.safetensors.index.json has one line per tensor."""
MAX_TOKENIZER_BYTES = 256 * 1024**2
"""tokenizer.json, or a file that transformers converts to it. A vocabulary of 262,144 tokens takes 33 MB."""
MAX_TEMPLATE_BYTES = 1024**2

MAX_SHOWN_BYTES = 256
"""Of a file's begin, to tell what it is."""
PIECE_BYTES = 1024**2

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Of numbers with more digits than the interpreter writes, only how many bits they have."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"<a number of {x.bit_length()} bits>"


_repr = _Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlist = _repr.maxdict = _repr.maxtuple = 10


def shown(value: Any) -> str:
    """The shortened repr of a value, for error messages."""
    return _repr.repr(value)


def find(folder: Path, name: str) -> Path | None:
    """The path of a model's file, None if it is missing.

    Raises ModelError if the name or a link leaves the folder, or if the file is not a regular file.
    """
    require_inside(name, str(folder))
    path = folder / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not _is_inside(real, folder.resolve()):
        raise ModelError(f"{path} links to {real}, outside the model folder: replace the link with the file")
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is {regular_files.kind_of(mode)}, not a regular file")
    return path


def require_inside(name: str, model: str) -> None:
    """Raises ModelError unless `name` is a relative path that stays inside its folder."""
    if not name or "\0" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ModelError(f"{model}: {shown(name)} is not the name of a file inside the model folder")


def _is_inside(real: Path, folder: Path) -> bool:
    snapshots = folder.parent
    repo = snapshots.parent
    is_snapshot = snapshots.name == "snapshots" and repo.name.startswith("models--")
    return real.is_relative_to(folder) or (is_snapshot and real.parent == repo / "blobs")


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading, without blocking on a FIFO. Raises ModelError if it is not a regular file."""
    try:
        return os.fdopen(regular_files.open_regular(path), "rb")
    except regular_files.NotRegular as error:
        raise ModelError(f"{path} is {error.kind}, not a regular file") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def read(path: Path, max_bytes: int) -> bytes:
    """A whole file. Raises ModelError if it is larger than `max_bytes`, or not a regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ModelError(f"{path} has {size} bytes; at most {max_bytes} are allowed")
        return file.read(size)  # Python takes memory for as many bytes as are asked for


def wrong_file(path: Path, begin: bytes) -> ModelError | None:
    """The error for what a download may have left in a model's file, from its first bytes: a pointer of Git LFS, or a
    web page. None for others."""
    text = begin.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return ModelError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder")
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return ModelError(
            f"{path} is a web page, not the model: download the file itself (on the Hugging Face Hub, its address has "
            "/resolve/ and not /blob/), or log in where it needs that"
        )
    return None


def decode_json(path: Path, max_bytes: int, type: type[T]) -> T:
    """A JSON file as `type`, also what `type` leaves undecoded in it. Raises ModelError if it is too large or is
    not such an object."""
    data = read(path, max_bytes)
    try:
        _require_utf8(data)
        return msgspec.json.decode(data, type=type)
    except (ValueError, RecursionError) as error:
        if (wrong := wrong_file(path, data[:MAX_SHOWN_BYTES])) is not None:
            raise wrong from error
        raise ModelError(f"{path} is not a JSON object: {error}") from error


def _require_utf8(data: bytes) -> None:
    """Raises UnicodeDecodeError. In pieces, because a text may take four times the memory of its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(data), PIECE_BYTES):
        decoder.decode(data[begin : begin + PIECE_BYTES])
    decoder.decode(b"", final=True)


def without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raises ValueError if a name appears twice, because readers differ in which of the two they take."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"its header has {shown(name)} twice")
        seen.add(name)
