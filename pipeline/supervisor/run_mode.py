"""Options of a server run that are not settings: recording from the start, and debugging."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.config.source import SettingsSource
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.inline import InlineChild
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.restart.server_restart import AskRestart
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.signals import StopSignals

if TYPE_CHECKING:
    from pipeline.supervisor.restart.sleep import Sleeper


class ModelRun:
    """What a server that has one of several models shares with those of the others, and tells their owner; see
    pipeline/supervisor/models/."""

    def __init__(
        self,
        name: str,
        keys: SharedKeys,
        signals: StopSignals,
        start_gateway: Callable[[m.Launch, bool], Child],
        admit: Callable[[m.Prepared], bool],
        on_serving: Callable[[], None],
        take_turn: "Callable[[Sleeper], None]",
        restart_server: AskRestart,
    ) -> None:
        """`start_gateway` starts its gateway stage in the process that all models share. `admit` says whether the
        prepared model fits into memory_bytes. `on_serving` is called when it serves.
        `take_turn` is called in each turn of its loop while it serves: it puts the model to sleep
        for another one, or wakes it. `restart_server` replaces the whole server, and calls `Done` in the model's
        thread."""
        self.name = name
        self.keys = keys
        self.signals = signals
        self.start_gateway = start_gateway
        self.admit = admit
        self.on_serving = on_serving
        self.take_turn = take_turn
        self.restart_server = restart_server
        self.drain: m.Drain | None = None
        """How its gateway drains, if another server takes over."""


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
    model: "ModelRun | None" = None
    """Of one of several models."""
    takes_over: bool = False
    """It replaces a server that has its sockets until it is ready."""
    source: SettingsSource | None = None
    """Where the settings came from, to read it again; None if a program gave them."""

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger may stop a stage."""
        return bool(self.foreground) or self.inline

    def patience_s(self, timeout_s: float) -> float:
        """The timeout, or infinity if a debugger may stop a stage."""
        return float("inf") if self.is_debugged else timeout_s

    def start(self, launch: m.Launch, num_threads: int, *, waits: bool, fork_server: ForkServer | None = None) -> Child:
        """Start a stage. If it `waits`, it runs after `Child.begin`."""
        if self.model is not None and launch.stage == "gateway":
            return self.model.start_gateway(launch, waits)
        if self.inline:
            return InlineChild(launch, waits=waits)
        return ChildProcess(launch, num_threads, waits=waits, fork_server=fork_server)

    def launch(self, launch: m.Launch) -> m.Launch:
        """A stage's launch message with these options."""
        if (path := self.record.get(launch.name)) is not None:
            launch = msgspec.structs.replace(launch, record=m.Record(0, _path_of(path, launch.incarnation)))
        if self.instant and launch.stage == "execute":
            launch = msgspec.structs.replace(launch, entry=topology.INSTANT)
        if launch.name == self.foreground:
            launch = msgspec.structs.replace(launch, foreground=True, break_at=self.break_at)
        if self.takes_over and launch.stage == "gateway":
            launch = msgspec.structs.replace(launch, takes_over=True)
        if self.model is not None:
            launch = msgspec.structs.replace(launch, model=self.model.name)
        return launch


def _path_of(path: str, incarnation: int) -> str:
    """Each process of a stage has a recording of its own: x.rec, x.2.rec …"""
    given = Path(path)
    return path if incarnation == 1 else str(given.with_suffix(f".{incarnation}{given.suffix}"))
