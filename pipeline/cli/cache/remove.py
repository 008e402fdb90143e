"""`pipeline cache rm`: removes models by name."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.cache.command import remove_all
from pipeline.cli.cache.entries import Entry, entries_of, hub_entries, root_of
from pipeline.cli.complain import complain
from pipeline.cli.models import cached_models
from pipeline.config.closest import closest
from pipeline.config.settings import Settings
from pipeline.errors import UserError

LIBRARY = "pipeline.stages.prepare.sources.library"
"""The module that knows the repositories of well-known names."""


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1, and removes nothing, if a name is unknown; 1 also if what it names is in use."""
    try:
        root = root_of(settings)
        entries = entries_of(root)
        entries += hub_entries(entries)
        are_removed = remove_all(_chosen(args.names, entries), entries, root, args.dry_run)
    except (UserError, OSError) as error:
        complain("pipeline cache rm", error)
        return 1
    return 0 if are_removed else 1


def _chosen(names: Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
    """The entries that are named, and the wheels that only these were made from. Raises UserError for a name that none
    has."""
    names_of = _names(entries)
    library: Any = importlib.import_module(LIBRARY)
    names = [library.find(name) or name for name in names]
    names = [_whole(name, {one for known in names_of.values() for one in known}) for name in names]
    for name in names:
        if not any(name in known for known in names_of.values()):
            near = closest(name, {one for known in names_of.values() for one in known})
            raise UserError(f"nothing in the cache has the name {name}{near}; `pipeline cache ls` lists what it holds")
    chosen = [entry for entry in entries if names_of[entry.path] & set(names)]
    for wheel in entries:
        if wheel.kind == "wheel" and wheel not in chosen:
            made = [one for one in entries if one.kind == "model" and Path(one.source).is_relative_to(wheel.path)]
            if made and all(one in chosen for one in made):
                chosen.append(wheel)
    return chosen


def _whole(name: str, known: set[str]) -> str:
    """A name as a narrow terminal shows it, cut in its middle, is the only one with its begin and end."""
    begin, cut, end = name.partition("…")
    found = [one for one in known if one.startswith(begin) and one.endswith(end)] if cut and begin and end else []
    return found[0] if len(found) == 1 else name


def _names(entries: Sequence[Entry]) -> dict[str, set[str]]:
    """What each entry that can be removed by name is called, by its path: as `cache ls` and as `models` call it, and
    what it was made from."""
    models = {model.path: model for model in cached_models(entries)}
    found: dict[str, set[str]] = {}
    for entry in entries:
        found[entry.path] = set()
        if entry.kind in ("model", "wheel", "hub", "unfinished"):
            found[entry.path] = {entry.name, entry.name.removeprefix(f"{entry.kind}-"), entry.source} - {""}
        if (model := models.get(entry.path)) is not None:
            found[entry.path] |= {model.name, model.model}
    return found
