"""Finds the files of a model in GGUF format: one file, or the parts that llama.cpp's `gguf-split` writes."""

import re
from pathlib import Path, PurePath
from typing import TypeVar

from pipeline.stages.prepare.sources.source import ModelError, is_file

PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
"""The stem of a part's name; the numbers begin at 1."""
MAX_PARTS = 10_000
PROJECTOR = "mmproj"
NO_MODEL = (PROJECTOR, "imatrix")
"""Parts of the names of .gguf files that belong to a model: its projector of images, and statistics."""
KINDS = ("F16", "BF16", "F32", "Q8_0")
"""What projectors are stored as, the preferred one first. All of one model are the same tower."""


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
        found = sorted(path for path in folder.iterdir() if _is_gguf(path) and not is_beside(path.name))
    except OSError:
        return None  # reported when the folder is read
    if not found or is_file(folder / "config.json"):
        return None
    models = {model_name(path): path for path in reversed(found)}
    if len(models) > 1:
        names = ", ".join(path.name for path in list(reversed(models.values()))[:10])
        raise ModelError(f"{folder} has {len(models)} models in GGUF format: give the path of one of {names}")
    return found[0]


def is_beside(name: str) -> bool:
    """Whether a .gguf file is no model, by its name."""
    return any(part in name.lower() for part in NO_MODEL)


def is_projector(name: str) -> bool:
    return PROJECTOR in PurePath(name).name.lower()


def projector_beside(path: Path) -> Path | None:
    """The file in its folder with the vision tower of the model whose first file is `path`; None if there is none."""
    try:
        found = sorted(each for each in path.parent.iterdir() if _is_gguf(each))
    except OSError:
        return None  # reported when the model is read
    models = {stem_of(each) for each in found if not is_beside(each.name)}
    return projector_for(path, [each for each in found if is_projector(each.name)], len(models) < 2)


P = TypeVar("P", bound=PurePath)


def projector_for(path: P, projectors: list[P], is_only_model: bool) -> P | None:
    """Of these files that of the model `path`: one with the model's name in its own, or if it `is_only_model` beside
    them, any. Of several, that of the preferred kind."""
    named = [each for each in projectors if stem_of(path) in each.stem.lower()]
    return min(named or (projectors if is_only_model else []), key=_preference, default=None)


def stem_of(path: PurePath) -> str:
    """The name of a model without its part and quantization, in small letters."""
    match = PART.fullmatch(path.stem)
    return _QUANTIZATION.sub("", match["model"] if match else path.stem).lower()


_QUANTIZATION = re.compile(
    r"[-._](?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|TQ\d_\d)$", re.IGNORECASE
)


def _preference(path: PurePath) -> tuple[int, str]:
    kinds = (number for number, kind in enumerate(KINDS) if re.search(rf"(?:^|[-._]){kind}$", path.stem, re.IGNORECASE))
    return next(kinds, len(KINDS)), path.name


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and is_file(path)
