"""The manager of several models: which are loaded, which wait, and the gateway's process that they share.

    what clients want ──► waiting.py, in order ──► placement.decide ──► a thread loads or wakes it ──► serving
                                                          └──► others are unloaded, or put to sleep, first

Each model has a supervisor of its own in a thread (model_thread.py), which restarts the model's stages. The manager's
loop has the signals, the gateway's process and the states of the models, which it sends to the gateway whenever one
changes.
"""

import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence

from pipeline.config.models import ServerSettings
from pipeline.config.values.sizes import size_words
from pipeline.runtime import messages as m
from pipeline.runtime.messages.models import (
    RETRY_S,
    FromSharedGateway,
    KeepModel,
    LoadModel,
    ModelActivity,
    ModelReleased,
    Models,
    ModelState,
    ModelStatus,
    UnloadModel,
)
from pipeline.shm.available import available_bytes
from pipeline.supervisor.models.last_errors import LastErrors
from pipeline.supervisor.models.model_thread import Event, ManagedModel, ModelThread
from pipeline.supervisor.models.restart_orders import RestartOrders
from pipeline.supervisor.models.shared_gateway import SharedGateway
from pipeline.supervisor.models.waiting import WaitingModels
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.restart.recovery import RestartBudget
from pipeline.supervisor.restart.server_restart import ServerRestart
from pipeline.supervisor.restart.take_over import TakeOver
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.listeners import url_of, zmq_address
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.signals import TerminationSignals
from pipeline.supervisor.stopping import EXIT_NO_ROOM, EXIT_NOT_STARTED, EXIT_OK, EXIT_STAGE_DIED

POLL_S, CALM_S = 1.0, 5.0


class ModelManager:
    """Owns the models' threads and the gateway's process."""

    def __init__(
        self,
        server: ServerSettings,
        listeners: Sequence[socket.socket],
        admins: Sequence[socket.socket],
        keys: SharedKeys,
        run_mode: RunMode,
        log: logging.Logger,
        fork_server: ForkServer | None,
        restart: ServerRestart,
        take_over: TakeOver | None = None,
    ) -> None:
        """`fork_server` belongs to the caller, as of `Supervisor`. `restart` replaces the server, which itself replaces
        the one of `take_over`."""
        self._restart, self._take_over = restart, take_over
        self._settings = server.shared
        self._listeners, self._admins = listeners, admins
        self._keys = keys
        self._run_mode = run_mode
        self._log = log
        self._fork_server = fork_server
        self._url = url_of(listeners[0], "https" if server.shared.gateway.ssl_certfile else "http")
        self._errors = LastErrors(log)
        before = 0 if take_over is None else take_over.memory_bytes
        self.memory_bytes = server.shared.memory_bytes or before or available_bytes()
        self._models = {
            name: ManagedModel(name, one, num_bytes=0, keep_s=one.idle_unload_s) for name, one in server.models.items()
        }
        how = self._load, self._release, self._does_not_fit, log
        self._waiting = WaitingModels(self._models, self.memory_bytes, server.shared.swap_quantum_s, *how)
        self._at_start = [name for name, one in server.models.items() if one.load_at_start]
        """Those that are not begun yet, one after the other: the order decides which fit."""
        self._starting = ""
        """The one of them that is being prepared."""
        self._events: queue.SimpleQueue[tuple[str, Event, int]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._orders = RestartOrders(restart, lambda: os.eventfd_write(self._wake_fd, 1))
        self._signals = TerminationSignals()
        self._gateway = SharedGateway(
            *(server.shared, listeners, admins, keys, log, fork_server), takes_over=take_over is not None
        )
        self._budget = RestartBudget(server.shared.supervisor.max_restarts)
        self._is_ending = False
        self._admitting = threading.Lock()
        """Of two models that are prepared at the same time, the second one counts the first one with its size."""
        self._is_ready = False
        self._reported = Models([])

    # ---------------------------------------------------------------------------------------------------------- life

    def run(self, begun: float) -> int:
        """Serve until a signal comes. Returns the exit code."""
        names = ", ".join(self._models)
        self._info("starting", models=names, memory_bytes=size_words(self.memory_bytes))
        self._gateway.ensure_alive()
        self._tell()
        while not self._signals.take() and not self._restart.turn():
            self._turn()
            if not self._is_ready and not (self._at_start or self._starting or self._is_loading()):
                self._is_ready = True
                loaded = [one.name for one in self._models.values() if one.state == "loaded"]
                if all(one.state == "failed" for one in self._models.values()):
                    self._log.error("cannot start: none of the models could be loaded")
                    return EXIT_NOT_STARTED
                took_s = f"{time.monotonic() - begun:.2f}"
                keys = "on" if self._keys.are_needed else "off"
                zmq = zmq_address(self._settings, list(self._listeners)) or "off"
                self._info(
                    f"ready on {self._url}",
                    models=", ".join(loaded) or "none",
                    zmq=zmq,
                    **({"admin": url_of(self._admins[0])} if self._admins else {}),
                    api_keys=keys,
                    took_s=took_s,
                )
                self._tell()  # the gateway listens from now on, if it replaces another one
                if self._take_over is not None:
                    self._take_over.tell()
            if not self._gateway.is_alive and (code := self._restart_gateway()):
                return self._end(code)
        return self._end(EXIT_OK)

    def _turn(self) -> None:
        """Wait for something, and handle all that came."""
        self._load_wanted()
        self._tell()
        poll_s = CALM_S if all(one.state in ("loaded", "unloaded") for one in self._models.values()) else POLL_S
        soonest_s = min([*self._due(), self._waiting.due_s, time.monotonic() + poll_s])
        fds = [self._wake_fd, self._signals.fileno(), *self._gateway.filenos()]
        select.select(fds, [], [], max(0.0, soonest_s - time.monotonic()))
        for message in self._gateway.receive():
            self._handle(message)
        self._take_events()

    def _end(self, code: int) -> int:
        """Unload all models, then end the gateway."""
        self._is_ending = True
        self._at_start.clear()
        self._waiting.clear()
        drain = self._restart.drain
        timeout_s = self._settings.supervisor.drain_timeout_s if drain is None else drain.deadline_s
        self._info("draining", timeout_s="none" if timeout_s == m.NO_LIMIT_S else timeout_s)
        for one in self._models.values():
            self._unload(one, drain)
        while any(one.thread is not None for one in self._models.values()):
            if self._signals.take():
                for one in self._models.values():
                    if one.thread is not None:
                        one.thread.stop()
            self._take_events()
            self._tell()
            select.select([self._wake_fd, self._signals.fileno()], [], [], POLL_S)
        if not self._gateway.stop(self._settings.supervisor.stop_timeout_s):
            self._log.error("the gateway did not stop in time; killing it")
            code = max(code, EXIT_STAGE_DIED)
        self._info("stopped", code=code)
        return code

    def _restart_gateway(self) -> int:
        """The gateway's process has died. Returns an exit code if it does too often."""
        reason = self._gateway.why_ended()
        delay_s = self._budget.died("gateway.0", time.monotonic(), was_ready=True, suspects=[])
        if isinstance(delay_s, str):
            self._log.error(f"gateway.0 died: {reason}; not restarted: {delay_s}")
            return EXIT_STAGE_DIED
        self._log.error(f"gateway.0 died: {reason}")
        self._gateway.ensure_alive()
        for one in self._models.values():  # its streams have ended with it
            one.is_busy, one.is_release_asked, one.idle_since_s = False, False, time.monotonic()
        return 0

    def close(self) -> None:
        """Free everything. All threads have ended, unless an error has ended the loop."""
        for one in self._models.values():
            if one.thread is not None:
                one.thread.stop()
                one.thread.stop()
                one.thread.join()
        self._gateway.close()
        self._signals.close()
        self._errors.close()
        os.close(self._wake_fd)

    # ------------------------------------------------------------------------------------------------------- clients

    def _handle(self, message: FromSharedGateway) -> None:
        model = self._models[message.name]
        match message:
            case LoadModel(_, is_asked_for):
                has_failed = model.state == "failed" and time.monotonic() < model.failed_s + RETRY_S
                if is_asked_for or not has_failed:
                    model.is_wanted = True
                    self._want(model)
            case UnloadModel():
                self._waiting.drop(model.name)
                self._unload(model)
            case KeepModel(_, idle_s):
                model.keep_s = 0.0 if idle_s < 0 else max(idle_s, 1e-9)
            case ModelActivity(_, is_busy):
                model.is_busy, model.idle_since_s = is_busy, time.monotonic()
                if is_busy and model.is_asleep:
                    self._want(model)
            case ModelReleased(_, is_idle):
                model.is_release_asked = False
                if is_idle:
                    self._unload(model)

    def _want(self, model: ManagedModel) -> None:
        has_stages = model.state in ("loading", "loaded") and not model.is_asleep
        if not self._is_ending and not has_stages and model.name not in self._at_start:
            self._waiting.want(model)

    def _release(self, model: ManagedModel) -> None:
        """Unload a model that is idle, unless a request has come meanwhile."""
        if model.state == "loaded" and not model.is_release_asked:
            model.is_release_asked = True
            self._gateway.release(model.name)

    def _unload(self, model: ManagedModel, drain: m.Drain | None = None) -> None:
        if model.thread is not None and model.state in ("loading", "loaded"):
            self._info("unloading", model=model.name)
            self._set(model, "unloading")
            model.thread.stop(drain)

    def _due(self) -> list[float]:
        """When models are unloaded without requests, by time.monotonic()."""
        return [one.idle_since_s + one.keep_s for one in self._idle()]

    def _idle(self) -> list[ManagedModel]:
        """Those that may be unloaded because they have no requests."""
        return [
            one
            for one in self._models.values()
            if one.state == "loaded" and one.keep_s
            if not (one.is_busy or one.is_release_asked or one.settings.pinned)
        ]

    # ----------------------------------------------------------------------------------------------------- placement

    def _load_wanted(self) -> None:
        """Unload what has no requests, and load what is wanted."""
        now_s = time.monotonic()
        for one in self._idle():
            if now_s >= one.idle_since_s + one.keep_s:
                self._release(one)
        if not self._starting and self._at_start:
            self._starting = self._at_start.pop(0)
            self._load(self._models[self._starting])
        self._waiting.turn()

    def _does_not_fit(self, model: ManagedModel, problem: str) -> None:
        self._log.error("does not fit", extra={"fields": {"model": model.name, "why": problem}})
        self._set(model, "failed", f"it does not fit: {problem}")

    def _load(self, model: ManagedModel) -> None:
        self._set(model, "loading")
        model.keep_s = model.settings.idle_unload_s
        self._errors.forget(model.name)
        model.thread = ModelThread(
            model.name,
            model.settings,
            self._listeners,
            self._gateway,
            self._keys,
            self._admit,
            self._post,
            self._orders.ask,
            self._run_mode,
            self._log,
            self._fork_server,
        )
        self._errors.watch(model.name, model.thread.thread_name)

    def _admit(self, name: str, num_bytes: int, asleep_bytes: int) -> bool:
        """Called in a model's thread, when it is prepared and its size is known."""
        with self._admitting:
            model = self._models[name]
            model.num_bytes, model.asleep_bytes = num_bytes, asleep_bytes
            fits = self._waiting.decide(model, num_bytes).loads
        self._post(name, "admitted" if fits else "no room", num_bytes)
        return fits

    # -------------------------------------------------------------------------------------------------------- events

    def _post(self, name: str, event: Event, number: int) -> None:
        """Called in a model's thread."""
        self._events.put((name, event, number))
        os.eventfd_write(self._wake_fd, 1)

    def _take_events(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        self._orders.turn(self.memory_bytes, is_serving=self._is_ready and not self._is_ending)
        while not self._events.empty():
            name, event, number = self._events.get()
            model = self._models[name]
            match event:
                case "serving":
                    model.idle_since_s = model.awake_since_s = time.monotonic()
                    if model.state == "loading":
                        self._set(model, "loaded")
                case "admitted" | "no room":
                    self._admitted(model, number, fits=event == "admitted")
                case "ended":
                    self._ended(model, number)
                case "asleep" | "not asleep" | "awake" | "not awake":
                    self._waiting.happened(model, event, number)

    def _admitted(self, model: ManagedModel, num_bytes: int, *, fits: bool) -> None:
        self._begun(model)
        used = sum(self._waiting.needed(one) for one in self._models.values() if one.has_memory and one is not model)
        fields = {"model": model.name, "needs": size_words(num_bytes), "free": size_words(self.memory_bytes - used)}
        self._log.info("fits" if fits else "does not fit now", extra={"fields": fields})

    def _begun(self, model: ManagedModel) -> None:
        """Of those that are loaded at the start, the next one may begin."""
        if self._starting == model.name:
            self._starting = ""

    def _ended(self, model: ManagedModel, code: int) -> None:
        assert model.thread is not None
        model.thread.join()
        model.thread = None
        model.turn = "awake"
        self._begun(model)
        was_asked = model.state == "unloading"
        if code == EXIT_NO_ROOM:
            self._set(model, "unloaded")
            if model.is_wanted:
                self._want(model)  # its size is known now
        elif was_asked or code == EXIT_OK:
            self._set(model, "unloaded")
            self._info("unloaded", model=model.name)
        else:
            self._set(model, "failed", self._errors.of(model.name) or f"its stages ended with code {code}")

    # -------------------------------------------------------------------------------------------------------- states

    def _set(self, model: ManagedModel, state: ModelState, problem: str = "") -> None:
        model.had_loaded = state == "failed" and model.state == "loaded"
        model.state, model.problem, model.since_s = state, problem, time.time()
        if state == "failed":
            model.failed_s = time.monotonic()
        if state in ("loaded", "failed"):
            model.is_wanted = False

    def _is_loading(self) -> bool:
        return any(one.state == "loading" for one in self._models.values())

    def _tell(self) -> None:
        """Tell the gateway the states, if they have changed."""
        idle = {one.name for one in self._idle()}
        found = [self._status(one, is_idle=one.name in idle) for one in self._models.values()]
        reported = Models(found, self._is_ready, self._is_ending, self._restart.is_due)
        if reported != self._reported:
            self._reported = reported
            self._gateway.tell(reported)

    def _status(self, model: ManagedModel, *, is_idle: bool) -> ModelStatus:
        """A model as the gateway shows it; `is_idle`: it may be unloaded."""
        sleeps = model.state == "loaded" and model.thread is not None and model.thread.is_asleep
        monotonic_to_unix_s = time.time() - time.monotonic()
        return ModelStatus(
            name=model.name,
            aliases=model.settings.aliases,
            adapters=tuple(model.settings.lora.adapters),
            state="sleeping" if sleeps else model.state,
            problem=model.problem,
            since_s=model.since_s,
            num_bytes=model.num_bytes,
            is_pinned=model.settings.pinned,
            position=self._waiting.position(model.name),
            waits_for=self._waiting.waits_for(model.name),
            waits_since_s=self._waiting.since_s(model.name),
            num_turns=model.num_turns,
            had_loaded=model.had_loaded,
            expires_s=round(monotonic_to_unix_s + model.idle_since_s + model.keep_s) if is_idle else 0.0,
        )

    def _info(self, text: str, **fields: object) -> None:
        self._log.info(text, extra={"fields": fields})
