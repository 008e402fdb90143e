"""Options of `pipeline serve` that make a `RunMode`: the stages that they name, and the terminal of a debugged one."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.cli.out_file import require_writable
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.runtime import topology


def stage_name(text: str, settings: Settings, option: str) -> str:
    """The stage process that a user names as `ingest` or `ingest.0`. Raises ConfigError."""
    names = [name for row in topology.TOPOLOGY for name in topology.replicas_of(settings, row.name)]
    matches = [name for name in names if text in (name, name.partition(".")[0])]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise ConfigError([f"{option}: there is no stage {text!r}; stages are {', '.join(names)}"])
    raise ConfigError([f"{option}: {text} has {len(matches)} replicas; choose one of {', '.join(matches)}"])


@contextmanager
def terminal() -> Iterator[None]:
    """Restore the terminal's attributes at the end. A stage killed while its debugger reads a line leaves echo off."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def recordings(orders: list[str], settings: Settings) -> dict[str, str]:
    """The values of `--record STAGE=FILE`: files by stage. Raises ConfigError."""
    files: dict[str, str] = {}
    for order in orders:
        name, equals, path = order.partition("=")
        if not equals or not path:
            raise ConfigError([f"--record {order}: needs STAGE=FILE, such as schedule=schedule.rec"])
        stage = stage_name(name, settings, f"--record {order}")
        if stage in files:
            raise ConfigError([f"--record {order}: {stage} is already recorded into {files[stage]}"])
        files[stage] = str(Path(path).absolute())
        require_writable(Path(path), f"--record {name}")
    if len(set(files.values())) < len(files):
        raise ConfigError(["--record: two stages can't be recorded into one file"])
    return files
