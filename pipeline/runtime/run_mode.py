"""How a server is run, beside its settings: what is recorded of it from the start, and what is run so that it can be
looked at."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.cli.out_file import require_writable
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.inline import InlineChild
from pipeline.supervisor.process import Child


class RunMode(msgspec.Struct, frozen=True):
    record: dict[str, str] = {}
    """Files, by the name of the stage, as `ingest.0`, whose inbox is recorded into it from the start."""

    instant: bool = False
    """No model: steps are answered at once with made-up ids."""
    foreground: str = ""
    """Name of the stage, as `schedule.0`, that has the terminal. Nothing is too late while there is one: it may be
    stopped in a debugger."""
    break_at: str = ""
    """A function of that stage whose calls stop in the debugger."""
    inline: bool = False
    """All stages are threads of one process."""

    def patience_s(self, timeout_s: float) -> float:
        """How long something may take that a debugger may hold up."""
        return float("inf") if self.foreground or self.inline else timeout_s

    def start(self, launch: m.Launch, num_threads: int) -> Child:
        """Start a stage."""
        return InlineChild(launch) if self.inline else Child(launch, num_threads)

    def launch(self, launch: m.Launch) -> m.Launch:
        """What a child is told, with what this asks of it."""
        if (path := self.record.get(launch.name)) is not None:
            launch = msgspec.structs.replace(launch, record=m.Record(0, path))
        if self.instant and launch.stage == "execute":
            launch = msgspec.structs.replace(launch, entry=topology.INSTANT)
        if launch.name == self.foreground:
            launch = msgspec.structs.replace(launch, foreground=True, break_at=self.break_at)
        return launch


def stage_name(text: str, settings: Settings, option: str) -> str:
    """The process that a user means by `ingest` or `ingest.0`. Raises ConfigError."""
    names = [name for row in topology.TOPOLOGY for name in topology.replicas_of(settings, row.name)]
    meant = [name for name in names if text in (name, name.partition(".")[0])]
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise ConfigError([f"{option}: there is no stage {text!r}, only {', '.join(names)}"])
    raise ConfigError([f"{option}: there are {len(meant)} of {text}: say which of {', '.join(meant)}"])


@contextmanager
def terminal() -> Iterator[None]:
    """Leave the terminal as it was found: a stage that is killed while its debugger reads a line leaves it without
    echo."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def recordings(orders: list[str], settings: Settings) -> dict[str, str]:
    """What `--record STAGE=FILE` asks for. Raises ConfigError."""
    files: dict[str, str] = {}
    for order in orders:
        name, equals, path = order.partition("=")
        if not equals or not path:
            raise ConfigError([f"--record {order}: needs STAGE=FILE, as schedule=schedule.rec"])
        stage = stage_name(name, settings, f"--record {order}")
        if stage in files:
            raise ConfigError([f"--record {order}: {stage} is recorded into {files[stage]} already"])
        files[stage] = str(Path(path).absolute())
        require_writable(Path(path), f"--record {name}")
    if len(set(files.values())) < len(files):
        raise ConfigError(["--record: two stages can't be recorded into one file"])
    return files
