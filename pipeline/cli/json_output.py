"""Results as indented JSON: `--json FILE`, or `-` for standard output in place of tables."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.cli.out_file import require_writable, write_output, writing

OPTION = "--json"


def require_json_writable(given: str | None) -> None:
    """Before a measurement: raises ConfigError if the file can't be written."""
    if given and given != "-":
        require_writable(Path(given), OPTION)


def as_json(result: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def write_json(given: str | None, result: Any, show: Callable[[], None]) -> None:
    """Write a result to the file, after `show` has printed its tables. With `-`, print the JSON only."""
    if given == "-":
        sys.stdout.buffer.write(as_json(result))
        return
    show()
    if given:
        with writing(Path(given), OPTION):
            write_output(Path(given), as_json(result))
