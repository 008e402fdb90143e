"""Finds the files of a model in GGUF format: one file, or the parts that llama.cpp's `gguf-split` writes."""

import re
from pathlib import Path

from pipeline.stages.prepare.sources.source import ModelError, is_file

PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
"""The stem of a part's name; the numbers begin at 1."""
MAX_PARTS = 10_000


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is a file of, in order. Raises ModelError, naming a missing one, unless they
    are in its folder."""
    match = PART.fullmatch(path.stem)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelError(f"{path}: part {number} of {count} is not a part of at most {MAX_PARTS}: restore its name")
    names = [f"{match['model']}-{i:05}-of-{match['count']}{path.suffix}" for i in range(1, count + 1)]
    missing = [name for name in names if not is_file(path.with_name(name))]
    if missing:
        shown = ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
        raise ModelError(f"{path} is part {number} of {count}, but {len(missing)} are missing beside it: {shown}")
    return [path.with_name(name) for name in names]


def model_name(path: Path) -> str:
    """A file's name without suffix and part."""
    match = PART.fullmatch(path.stem)
    return match["model"] if match else path.stem


def state(paths: list[Path]) -> str:
    """Path, sizes and modification times of a model's files. Raises ModelError if one can't be read."""
    try:
        stats = [path.stat() for path in paths]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return "|".join([str(paths[0]), *(f"{stat.st_size}|{stat.st_mtime_ns}" for stat in stats)])


def only_model_in(folder: Path) -> Path | None:
    """The first file of the .gguf model in a folder; None if it has none, or a config.json.

    Raises ModelError if it has several models.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and is_file(path))
    except OSError:
        return None  # reported when the folder is read
    if not found or is_file(folder / "config.json"):
        return None
    models = {model_name(path): path for path in reversed(found)}
    if len(models) > 1:
        names = ", ".join(path.name for path in list(reversed(models.values()))[:10])
        raise ModelError(f"{folder} has {len(models)} models in GGUF format: give the path of one of {names}")
    return found[0]
