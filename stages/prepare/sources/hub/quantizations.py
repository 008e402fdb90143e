"""The .gguf files of a repository: which are models, their quantizations, and which one is meant.

NAME-Q4_K_M.gguf  NAME.Q8_0.gguf  UD-Q4_K_XL/NAME-UD-Q4_K_XL-00001-of-00003.gguf  mmproj-F16.gguf (a vision tower)
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from pipeline.config.closest import closest
from pipeline.stages.prepare.sources.gguf_files import PART, is_beside, is_projector, projector_for, stem_of
from pipeline.stages.prepare.sources.source import HubSource, ModelError

DEFAULT = "Q4_K_M"
DEFAULT_BITS = 4.85
BITS = {
    "Q2_K": 3.35,
    "Q3_K_S": 3.5,
    "Q3_K_M": 3.91,
    "Q3_K_L": 4.27,
    "Q4_0": 4.55,
    "Q4_1": 5.0,
    "Q4_K_S": 4.58,
    "Q5_0": 5.54,
    "Q5_1": 6.0,
    "Q5_K_S": 5.54,
    "Q5_K_M": 5.69,
    "Q6_K": 6.59,
    "Q8_0": 8.5,
    "MXFP4": 4.25,
}
"""Bits per weight of the usual ones. For others, the number in their names is close enough."""
MAX_SHOWN = 24

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|TQ\d_\d))$", re.IGNORECASE
)
_OTHER_SPELLINGS = {"FP16": "F16", "FP32": "F32"}


def models_of(names: Iterable[str]) -> dict[str, str]:
    """The models among a repository's files: each model's first file with its quantization, which may be empty."""
    found = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or is_beside(path.name):
            continue
        part = PART.fullmatch(path.stem)
        if part is None or int(part["number"]) == 1:
            found[name] = quantization_of(part["model"] if part else path.stem)
    return found


def quantization_of(stem: str) -> str:
    """The quantization that the name of a model ends with, in capitals; empty if it has none."""
    match = _QUANTIZATION.search(stem)
    return "" if match is None else _OTHER_SPELLINGS.get(match[1].upper(), match[1].upper())


def parts_of(name: str, names: Iterable[str]) -> list[str]:
    """All files of the model that has the file `name`, in order. Raises ModelError if the repository lacks one."""
    path = PurePosixPath(name)
    match = PART.fullmatch(path.stem)
    if match is None:
        return [name]
    numbers = range(1, int(match["count"]) + 1)
    parts = [str(path.with_name(f"{match['model']}-{i:05}-of-{match['count']}{path.suffix}")) for i in numbers]
    if missing := set(parts) - set(names):
        raise ModelError(f"{name} is one of {len(parts)} parts, and {min(missing)} is not beside it in the repository")
    return parts


def projector_of(name: str, names: Iterable[str]) -> str | None:
    """The file with the vision tower of the model that has the file `name`; None if the repository has none."""
    names = list(names)
    models = {stem_of(PurePosixPath(each)) for each in models_of(names)}
    projectors = [PurePosixPath(each) for each in names if each.lower().endswith(".gguf") and is_projector(each)]
    found = projector_for(PurePosixPath(name), projectors, len(models) < 2)
    return None if found is None else str(found)


def choose(source: HubSource, models: Mapping[str, str]) -> str:
    """The first file of the model that is meant, of `models_of`. Raises ModelError, naming those that exist."""
    if source.file:
        if source.file in models:
            return source.file
        near = closest(source.file, models)
        raise ModelError(f"{source.repo} has no model in a file {source.file}{near or _listed(models)}")
    wanted = _OTHER_SPELLINGS.get(source.quantization, source.quantization) or DEFAULT
    found = [name for name, quantization in models.items() if quantization == wanted]
    if not found and source.quantization:
        near = closest(wanted, models.values())
        raise ModelError(f"{source.repo} has no .gguf file of {wanted}{near}{_listed(models)}")
    if not found:
        nearest = min(models.values(), key=_distance)
        found = [name for name, quantization in models.items() if quantization == nearest]
    if len(found) > 1:
        raise ModelError(
            f"{source.repo} has {len(found)} models of {models[found[0]] or 'no quantization'}: name the file, as "
            f"{source.repo}/{found[0]} or {source.repo}/{found[1]}"
        )
    return found[0]


def _distance(quantization: str) -> tuple[float, str]:
    """How far a quantization is from the default; more bits rather than fewer if two are as far."""
    number = re.search(r"\d+", quantization)
    bits = BITS.get(quantization, float(number[0]) if number else 1e6)
    return abs(bits - DEFAULT_BITS) - 1e-3 * (bits > DEFAULT_BITS), quantization


def _listed(models: Mapping[str, str]) -> str:
    known = list(dict.fromkeys(quantization or name for name, quantization in models.items()))
    more = ", …" if len(known) > MAX_SHOWN else ""
    return f"; it has {', '.join(known[:MAX_SHOWN])}{more}" if known else "; it has no .gguf files"
