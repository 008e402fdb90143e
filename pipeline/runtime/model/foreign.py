"""Architectures that installed packages add: entry points of the group `pipeline.models`, named by their `model_type`.

    [project.entry-points."pipeline.models"]
    cwm = "pipeline_cwm:MODEL"

Each is a `ForeignModel`, which names what prepare and execute read, so that each stage imports only its own part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

from pipeline.errors import UserError

GROUP = "pipeline.models"


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """An architecture of a package. Names are those of entry points, `package.module:object`."""

    config: str
    """Of an `HfArchitecture` (stages/prepare/families/architecture.py): how to read config.json, and the tensors."""
    build: str | None = None
    """Of a function like `build` in stages/execute/models/decoder.py, which is the default."""
    reference: str | None = None
    """Of a function without arguments that `check-model` calls before it loads the model with transformers, to register
    classes there."""

    def load(self, name: str) -> Any:
        """The object with a name. Raises UserError if it can't be imported."""
        from importlib.metadata import EntryPoint

        return _load(EntryPoint(name, name, GROUP))


@cache
def find(model_type: str) -> ForeignModel | None:
    """The architecture of a package for a `model_type`; None if no package has one. Raises UserError if several have,
    or if it can't be imported."""
    from importlib.metadata import entry_points  # which takes longer than all else that executors import of this

    found = entry_points(group=GROUP, name=model_type)
    packages = sorted({"an unknown package" if one.dist is None else one.dist.name for one in found})
    if len(packages) > 1:
        raise UserError(
            f"model_type {model_type!r} is in several packages: uninstall all but one of {', '.join(packages)}"
        )
    for one in found:
        model = _load(one)
        if not isinstance(model, ForeignModel):
            raise UserError(f"entry point {one.name} = {one.value} of {packages[0]} is no ForeignModel")
        return model
    return None


def register(model_type: object) -> None:
    """Call the `reference` of the package that has a `model_type`, if one has. Raises UserError as `find`."""
    package = find(model_type) if isinstance(model_type, str) else None
    if package is not None and package.reference is not None:
        function: Callable[[], object] = package.load(package.reference)
        with errors_of(f"{package.reference} of model_type {model_type!r} failed"):
            function()


def installed() -> str:
    """The packages with architectures, and their versions: what was prepared with others is prepared again."""
    from importlib.metadata import entry_points

    dists = {one.dist.name: one.dist.version for one in entry_points(group=GROUP) if one.dist is not None}
    return ", ".join(f"{name} {version}" for name, version in sorted(dists.items()))


def _load(point: Any) -> Any:
    """The object of an `EntryPoint`."""
    with errors_of(f"entry point {point.name} = {point.value} of {GROUP} can't be imported"):
        return point.load()


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Raises UserError for whatever a package raises, also SystemExit, with the line that raised it; its own UserErrors
    stay."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a package may raise anything
        at = "".join(f" ({Path(one.filename).name}:{one.lineno})" for one in extract_tb(error.__traceback__)[-1:])
        raise UserError(f"{what}: {type(error).__name__}: {error}{at}") from error
