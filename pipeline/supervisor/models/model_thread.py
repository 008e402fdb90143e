"""A model of several: a whole supervisor for its stages, in a thread that lives while the model is loaded."""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.log.logs import of_model
from pipeline.runtime.messages.models import ModelState
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.models.memory import PROCESSES_BYTES, needs_of
from pipeline.supervisor.models.shared_gateway import ModelGateway, SharedGateway
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.inline import THREAD
from pipeline.supervisor.restart.server_restart import Done as RestartDone
from pipeline.supervisor.restart.server_restart import RestartOrder
from pipeline.supervisor.run_mode import ModelRun, RunMode
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.signals import AskedToStop
from pipeline.supervisor.stopping import EXIT_NOT_STARTED
from pipeline.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from pipeline.supervisor.processes.child import Child
    from pipeline.supervisor.restart.sleep import Sleeper

Turn = Literal["awake", "falling asleep", "asleep", "waking"]
Event = Literal["admitted", "no room", "serving", "asleep", "not asleep", "awake", "not awake", "ended"]
"""What happens in a model's thread. A number comes with it: the bytes that it needs ("admitted", "no room") or saved
("asleep"), or the exit code ("ended")."""


class ManagedModel(msgspec.Struct, eq=False):
    """What the manager knows of a model. Only its loop changes it."""

    name: str
    settings: Settings
    state: ModelState = "unloaded"
    problem: str = ""
    since_s: float = 0.0
    num_bytes: int = 0
    """What it needs; 0 if that is not known yet."""
    is_busy: bool = False
    idle_since_s: float = 0.0
    """By time.monotonic()."""
    keep_s: float = 0.0
    """How long it stays without a request; 0 for ever."""
    failed_s: float = 0.0
    """When it failed, by time.monotonic()."""
    had_loaded: bool = False
    """It was loaded before it failed."""
    is_release_asked: bool = False
    """The gateway was asked whether it is idle, so that it may be unloaded."""
    is_wanted: bool = False
    """By a client, since it was loaded last."""
    thread: "ModelThread | None" = None
    turn: Turn = "awake"
    """Whether it sleeps for another model, or is about to."""
    awake_since_s: float = 0.0
    """Since it was loaded or woken, by time.monotonic()."""
    saved_bytes: int = 0
    """What it has saved while it sleeps."""
    num_turns: int = 0
    """How often it was put to sleep for another one."""
    asleep_bytes: int = 0
    """What its processes take while it sleeps; 0 if that is not known yet."""

    @property
    def has_memory(self) -> bool:
        return self.state not in ("unloaded", "failed")

    @property
    def is_asleep(self) -> bool:
        """It sleeps for another model, and may wake."""
        return self.turn == "asleep" and self.state == "loaded"

    @property
    def takes_turns(self) -> bool:
        """Whether it can be put to sleep for another one."""
        execute, is_on_request = self.settings.execute, self.thread is not None and self.thread.is_asleep
        can_sleep = execute.device == "cpu" and execute.launcher == "process" and not self.settings.pinned
        return can_sleep and not (self.turn == "awake" and is_on_request)

    @property
    def stays_bytes(self) -> int:
        """What it needs while it sleeps, at most if it does not yet: its processes, its swap space, and its saved KV
        cache if that is in memory."""
        execute = self.settings.execute
        saved = self.saved_bytes if self.turn == "asleep" else kv_bytes_in_ram(self.settings) * execute.num_ranks
        processes = self.asleep_bytes or PROCESSES_BYTES
        return processes + execute.swap_bytes + (0 if execute.swap_dir else saved)


class ModelThread:
    """Loads a model, serves it and unloads it."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        listeners: Sequence[socket.socket],
        gateway: SharedGateway,
        keys: SharedKeys,
        admit: Callable[[str, int, int], bool],
        report: Callable[[str, Event, int], None],
        restart_server: Callable[[RestartOrder, Callable[[Callable[[], None]], None], RestartDone], None],
        run_mode: RunMode,
        log: logging.Logger,
        fork_server: ForkServer | None = None,
    ) -> None:
        """The first two are called in the thread, with the name: `admit` with the bytes that the prepared model needs
        and those that its processes take while it sleeps, and `report` with the other events. `restart_server` replaces
        the whole server; it gets what has a function called in this thread, to answer."""
        self._fork_server = fork_server
        self._name, self._settings = name, settings
        self._listeners = listeners
        self._gateway = gateway
        self._admit = admit
        self._report = report
        self._signals = AskedToStop()
        self._log = log
        self._run_of_model = ModelRun(
            name,
            keys,
            self._signals,
            lambda launch, waits: self._start_gateway(launch, waits=waits),
            self._fits,
            lambda: report(name, "serving", 0),
            self._take_turn,
            lambda order, answer: restart_server(order, self._call, answer),
        )
        self._run_mode = msgspec.structs.replace(run_mode, model=self._run_of_model)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions for the supervisor's loop to call."""
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether it is to sleep for another model, or to wake."""
        self.thread_name = f"{THREAD}{of_model(SUPERVISOR, name)}"
        self._supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._run, name=self.thread_name)
        self._thread.start()

    def stop(self, drain: m.Drain | None = None) -> None:
        """Unload the model when its streams have ended, or at the end of the drain; a second time, at once."""
        self._run_of_model.drain = self._run_of_model.drain or drain
        self._signals.ask()

    def _call(self, function: Callable[[], None]) -> None:
        """Have the supervisor's loop call a function, while it serves."""
        self._calls.put(function)
        self._signals.wake()

    @property
    def is_asleep(self) -> bool:
        """Whether the model sleeps (docs/sleep.md)."""
        supervisor = self._supervisor
        return supervisor is not None and supervisor.is_asleep

    def set_turn(self, sleeps: bool) -> None:
        """Sleep for another model, or wake up. Reports "asleep" or "awake", or "not asleep" or "not awake" if it
        can't."""
        self._asked.put(sleeps)
        self._signals.wake()

    def _take_turn(self, sleeper: "Sleeper") -> None:
        """Called in the supervisor's loop."""
        while not self._calls.empty():
            self._calls.get()()
        while not self._asked.empty():
            sleeps = self._asked.get()

            event: Event = "asleep" if sleeps else "awake"
            failure: Event = "not asleep" if sleeps else "not awake"

            def done(problem: str, event: Event = event, failure: Event = failure) -> None:
                if problem:
                    self._log.warning(f"does not take turns now: {problem}")
                self._report(self._name, failure if problem else event, sleeper.saved_bytes)

            sleeper.set_turn(sleeps, done)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        code = EXIT_NOT_STARTED
        begun = time.monotonic()
        # Closed when the gateway stage has drained. `socket.dup` would make the gateway's own one blocking.
        listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in self._listeners]
        try:
            supervisor = Supervisor(self._settings, listeners, self._log, self._run_mode, fork_server=self._fork_server)
            self._supervisor = supervisor
            try:
                code = supervisor.run(begun)
            finally:
                self._supervisor = None
                supervisor.close()
        except (UserError, ConfigError, OSError) as error:
            self._log.error(str(error))
        except Exception:  # noqa: BLE001 - a fault of ours ends this model, and not the others
            self._log.exception("failed")
        finally:
            for one in listeners:
                one.close()
            self._report(self._name, "ended", code)

    def _start_gateway(self, launch: m.Launch, *, waits: bool) -> "Child":
        return ModelGateway(msgspec.structs.replace(launch, model=self._name), self._gateway, waits=waits)

    def _fits(self, prepared: m.Prepared) -> bool:
        needs = needs_of(self._settings, Path(prepared.model_dir))
        return self._admit(self._name, needs.awake, needs.processes_asleep)
