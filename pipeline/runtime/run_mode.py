"""Options of a server run that are not settings: recording from the start, and debugging."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.cli.out_file import require_writable
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.inline import InlineChild
from pipeline.supervisor.process import Child


class RunMode(msgspec.Struct, frozen=True):
    record: dict[str, str] = {}
    """Stage name, such as `ingest.0`, → the file that its inbox is recorded into from the start."""

    instant: bool = False
    """Run without a model: steps return made-up ids at once."""
    foreground: str = ""
    """The stage, such as `schedule.0`, that gets the terminal. Timeouts are disabled, because a debugger may stop
    it."""
    break_at: str = ""
    """A function of that stage; each call stops in the debugger."""
    inline: bool = False
    """Run all stages as threads of one process."""
    source: SettingsSource | None = None
    """Where the settings came from, to read it again; None if a program gave them."""

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger may stop a stage."""
        return bool(self.foreground) or self.inline

    def patience_s(self, timeout_s: float) -> float:
        """The timeout, or infinity if a debugger may stop a stage."""
        return float("inf") if self.is_debugged else timeout_s

    def start(self, launch: m.Launch, num_threads: int, *, waits: bool) -> Child:
        """Start a stage. If it `waits`, it runs after `Child.begin`."""
        return InlineChild(launch, waits=waits) if self.inline else Child(launch, num_threads, waits=waits)

    def launch(self, launch: m.Launch) -> m.Launch:
        """A stage's launch message with these options."""
        if (path := self.record.get(launch.name)) is not None:
            launch = msgspec.structs.replace(launch, record=m.Record(0, _path_of(path, launch.incarnation)))
        if self.instant and launch.stage == "execute":
            launch = msgspec.structs.replace(launch, entry=topology.INSTANT)
        if launch.name == self.foreground:
            launch = msgspec.structs.replace(launch, foreground=True, break_at=self.break_at)
        return launch


def _path_of(path: str, incarnation: int) -> str:
    """Each process of a stage has a recording of its own: x.rec, x.2.rec …"""
    given = Path(path)
    return path if incarnation == 1 else str(given.with_suffix(f".{incarnation}{given.suffix}"))


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
