"""`pipeline config presets`: the settings files that come with this program."""

import argparse
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pipeline.cli.watch import draw
from pipeline.config.load import presets


class Preset(msgspec.Struct, frozen=True):
    name: str
    description: str
    """The comment that the file begins with."""
    path: str
    settings: dict[str, Any]


def run(args: argparse.Namespace) -> int:
    found = [_preset(name, path) for name, path in presets().items()]
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("preset", no_wrap=True)
    table.add_column("what it is for")
    for preset in found:
        table.add_row(preset.name, preset.description)
    console = draw.console()
    console.print(table, markup=False)
    console.print("\nUse one with --config NAME. `pipeline config show --config NAME` prints all its settings.")
    return 0


def _preset(name: str, path: Path) -> Preset:
    text = path.read_text("utf-8")
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return Preset(name, " ".join(comment), str(path), tomllib.loads(text))
