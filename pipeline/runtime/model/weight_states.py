"""What the weight files of a folder were when it was prepared. The executor reads them in place: if another file had
their name when it is started again, streams would go on with other weights."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from pipeline.runtime.files.regular_files import read_regular

WEIGHT_STATES = "weight_files.json"
MAX_BYTES = 1 << 20

FileState = tuple[int, int]
"""Bytes, and the time of modification in ns."""


def of(paths: Iterable[Path]) -> dict[str, FileState]:
    """By path. Raises OSError."""
    stats = ((str(path), path.stat()) for path in paths)
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


def save(states: dict[str, FileState], folder: Path) -> None:
    """Write them into a prepared folder. Raises OSError."""
    (folder / WEIGHT_STATES).write_bytes(msgspec.json.encode(states))


def load(folder: Path) -> dict[str, FileState]:
    """Those of a prepared folder; empty for one whose files are identified otherwise. Raises OSError and
    msgspec.DecodeError."""
    path = folder / WEIGHT_STATES
    if not path.is_file():
        return {}
    return msgspec.json.decode(read_regular(path, MAX_BYTES), type=dict[str, FileState])
