"""`pipeline cache ls` and `pipeline cache prune`."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from pipeline.cli.cache.entries import Entry, Kind, disk_bytes, entries_of, hub_entries, remove, root_of
from pipeline.cli.complain import complain
from pipeline.cli.watch import draw
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.log.printable import printable

NAME, MIN_NAME, GAP = 1, 16, 2
"""The place of the column of names, its least width, and the columns between two others."""
COUNTED: dict[Kind, tuple[str, str]] = {
    "kernels": ("compiled library", "compiled libraries"),
    "crashes": ("crash report", "crash reports"),
}
"""Kinds that have one row for all their entries, with the noun for one and for several."""


def run_ls(args: argparse.Namespace, settings: Settings) -> int:
    """List the cache. Returns 1 if it can't be read."""
    try:
        root = root_of(settings)
        entries = entries_of(root)
        hub = hub_entries(entries)
    except (UserError, OSError) as error:
        return _failed("ls", error)
    if args.json:
        print(msgspec.json.encode([*entries, *hub]).decode())
        return 0
    console = draw.console()
    if entries or hub:
        console.print(_table([*entries, *hub], console.width))
    if not entries:
        console.print(f"{root} is empty", soft_wrap=True)
        return 0
    on_disk = disk_bytes(entries)
    shared = sum(entry.num_bytes for entry in entries) - on_disk
    sharing = f"; models of the same content share {draw.size(shared)} of them" if shared else ""
    console.print(f"{draw.size(on_disk)} in {root}{sharing}", markup=False, soft_wrap=True)
    return 0


def run_prune(args: argparse.Namespace, settings: Settings) -> int:
    """Remove what is old, or all. Returns 1 if the cache can't be read or changed. Raises ConfigError."""
    if args.older_than is None and not args.all:
        raise ConfigError(["cache prune: needs --older-than TIME, such as 30d, or --all"])
    try:
        root = root_of(settings)
        entries = entries_of(root)
        oldest_s = float("inf") if args.all else time.time() - args.older_than
        chosen = [entry for entry in entries if entry.last_used_s <= oldest_s]
        remove_all(chosen, entries, root, args.dry_run)
    except (UserError, OSError) as error:
        return _failed("prune", error)
    return 0


def remove_all(chosen: Sequence[Entry], entries: Sequence[Entry], root: Path, is_dry_run: bool) -> bool:
    """Remove those of `entries` that are chosen and not in use, and print what was removed, or would be, and what was
    not. Returns whether all were. Raises OSError."""
    before = disk_bytes(entries)
    removed = [entry for entry in chosen if entry.can_be_removed and (is_dry_run or remove(root, entry))]
    kept = [entry for entry in chosen if entry not in removed]
    # What a removed entry shares with one that stays is not freed.
    freed_bytes = before - disk_bytes(entry for entry in entries if entry not in removed)
    verb = "would remove" if is_dry_run else "removed"
    for entry in rows_of(removed):
        print(f"{verb} {printable(entry.name)} ({draw.size(entry.num_bytes)})")
    for entry in rows_of(kept):
        print(f"kept {printable(entry.name)}: {'not made by a server' if entry.kind == 'other' else 'in use'}")
    where = " and the hub's cache" if any(entry.kind == "hub" for entry in removed) else ""
    print(f"{verb} {draw.size(freed_bytes)} from {root}{where}" if removed else f"nothing to remove from {root}")
    return not kept


def rows_of(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, with all compiled libraries as one at the end, and then all crash reports."""
    rows = [entry for entry in entries if entry.kind not in COUNTED]
    for kind, (one_of_them, several) in COUNTED.items():
        found = [entry for entry in entries if entry.kind == kind]
        if found:
            name = f"{len(found)} {one_of_them if len(found) == 1 else several}"
            num_bytes, used_s = sum(one.num_bytes for one in found), max(one.last_used_s for one in found)
            folder = str(Path(found[0].path).parent)
            rows.append(Entry(name, kind, folder, num_bytes, used_s, "", any(one.in_use for one in found)))
    return rows


def ago(unix_s: float) -> str:
    """How long ago a time was, in one unit."""
    seconds = max(0, int(time.time() - unix_s))
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds // unit_s} {name} ago"
    return "just now"


def _table(entries: Sequence[Entry], width: int) -> Table:
    """At most `width` columns wide, if that leaves MIN_NAME for the names."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("kind", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("last used", justify="right", no_wrap=True)
    table.add_column("in use", no_wrap=True)
    rows = []
    for entry in rows_of(entries):
        in_use = draw.NONE if entry.kind == "other" else "yes" if entry.in_use else "no"
        name = entry.name.removeprefix(f"{entry.kind}-")
        rows.append([entry.kind, name, draw.size(entry.num_bytes), ago(entry.last_used_s), in_use])
    columns = zip(*([str(column.header) for column in table.columns], *rows), strict=True)
    widths = [max(map(len, cells)) for cells in columns]
    room = width - sum(widths) + widths[NAME] - GAP * (len(widths) - 1)
    for row in rows:
        row[NAME] = draw.shortened(row[NAME], max(MIN_NAME, room))
        table.add_row(*row)
    return table


def _failed(action: str, error: Exception) -> int:
    complain(f"pipeline cache {action}", error)
    return 1
