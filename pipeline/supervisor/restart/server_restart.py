"""Replaces the whole server by a new process of the code that is installed now: `pipeline restart --new-version`.

    asked ──► successor started, with our listening sockets ──► it serves ──► we drain, and end        side by side
    asked ──► we drain, and end ──► exec: the successor has our pid and our listening sockets          one at a time

No message passes between the two, so they may differ in anything: messages, settings, the model. Each serves the
requests that it has accepted. New connections wait in the sockets, which are open all the time.

Side by side, the process that a terminal or a service manager has started stays: it becomes a `waiter`, which passes
signals on to the successor and ends with its exit code. The server before passes them on too, from the moment when the
successor serves: who ends the server means both.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.runtime import messages as m
from pipeline.supervisor.restart import waiter
from pipeline.supervisor.restart.take_over import READY, TakeOver
from pipeline.supervisor.signals import TerminationSignals

END_S = 5.0
"""Time for a successor to end that is not needed."""
MAX_WORDS = 64 * 1024


class RestartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is replaced."""

    options: list[tuple[str, str]] = []
    """Settings to change, as texts `key=value`, each with its origin."""
    finish: m.FinishAt = "request"
    """When open requests end: by themselves, at the end of a sentence, or now."""
    closing_text: str = ""
    drain_s: float = 0.0
    """How long they may go on; 0 for as long as they need."""
    stops_first: bool = False
    """One at a time: this server ends before the next one starts."""


Done = Callable[[int, str], None]
"""Called once, with the pid of the successor, or with the reason why there is none."""

AskRestart = Callable[[RestartOrder, Done], None]


class ServerRestart:
    """Owns the successor until it serves, and what this process becomes at its end."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        admins: Sequence[socket.socket],
        log: logging.Logger,
        *,
        is_successor: bool,
        problem: str = "",
    ) -> None:
        """`is_successor`: this server has replaced another one itself. `problem` is why it can't be replaced."""
        self._settings = settings
        self._listeners, self._admins = listeners, admins
        self._log = log
        self._is_successor = is_successor
        self._problem = problem
        self._order: RestartOrder | None = None
        self._done: Done = lambda _, __: None
        self._successor: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._words = b""
        self._command: list[str] = []
        self._take_over: TakeOver | None = None
        self.is_due = False
        """This server must drain and end now."""
        self._is_stopped = False
        """A signal has come since: no other server follows if this one ends before that starts."""

    @property
    def drain(self) -> m.Drain | None:
        """How gateways drain; None if the server was not replaced."""
        order = self._order
        if order is None or not self.is_due:
            return None
        return m.Drain(
            order.drain_s or m.NO_LIMIT_S,
            is_leaving=True,
            has_successor=True,
            finish=order.finish,
            closing_text=order.closing_text,
        )

    def ask(self, order: RestartOrder, source: SettingsSource | None, memory_bytes: int, done: Done) -> None:
        """Replace the server. `source` is where its settings come from, if that was changed since its start."""
        execute = self._settings.execute
        if problem := self._problem:
            done(0, problem)
        elif self._order is not None:
            done(0, "the server is being restarted already")
        elif not order.stops_first and (execute.device != "cpu" or execute.launcher != "process"):
            is_gpu = execute.device != "cpu"
            what = f"execute.{'device' if is_gpu else 'launcher'} is {execute.device if is_gpu else execute.launcher!r}"
            done(0, f"{what}: there is no room for two executors; add --stop-first")
        else:
            self._begin(order, source, memory_bytes, done)

    def _begin(self, order: RestartOrder, source: SettingsSource | None, memory_bytes: int, done: Done) -> None:
        fds = [one.fileno() for one in self._listeners], [one.fileno() for one in self._admins]
        take_over = TakeOver(
            listeners=fds[0], admins=fds[1], options=order.options, source=source, memory_bytes=memory_bytes
        )
        self._command = [sys.executable, *sys.orig_argv[1:]]
        self._order = order
        if order.stops_first:
            self._take_over = take_over
            self._be_due()
            self._log.info("the server ends, and starts again")
            done(os.getpid(), "")
            return
        self._done = done
        self._ready_fd, theirs = os.pipe()
        os.set_blocking(self._ready_fd, False)
        try:
            self._successor = subprocess.Popen(
                self._command,
                pass_fds=[*fds[0], *fds[1], theirs],
                env=os.environ | msgspec.structs.replace(take_over, ready_fd=theirs).environ(),
            )
        except OSError as error:
            self._fail(f"it could not be started: {error}")
            return
        finally:
            os.close(theirs)
        self._log.info("starting the next server", extra={"fields": {"pid": self._successor.pid}})

    def turn(self) -> bool:
        """Notice what the successor says. Returns whether the server must drain and end now."""
        if self._successor is None or self._ready_fd < 0:
            return self.is_due
        try:
            while data := os.read(self._ready_fd, MAX_WORDS):
                self._words += data
        except BlockingIOError:
            return False
        if self._words == READY:
            self._be_due()
            self._close_pipe()
            fields = {"pid": self._successor.pid}
            self._log.info("the next server has taken over; ending when open requests have", extra={"fields": fields})
            self._done(self._successor.pid, "")
        else:
            code = self._end_successor()
            self._fail(self._words.decode(errors="replace") or f"it ended with code {code}; its log says why")
        return self.is_due

    def _be_due(self) -> None:
        """Drain and end, and have signals be for the successor too. They are caught already, as the server's loop must
        learn of them; its descriptor goes on to tell it."""
        self.is_due = True
        for number in TerminationSignals.CAUGHT:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, _: object) -> None:
        self._is_stopped = True
        if self._successor is not None and self._successor.poll() is None:
            self._successor.send_signal(number)

    def _fail(self, why: str) -> None:
        """This server goes on."""
        self._close_pipe()
        self._order, self._successor, self._words = None, None, b""
        self._log.error(f"the next server did not start: {why}")
        self._done(0, f"the next server did not start: {why}")

    def _end_successor(self) -> int:
        """End one that does not serve. Returns its exit code."""
        assert self._successor is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._successor.wait(END_S)
        self._successor.kill()
        return self._successor.wait()

    def _close_pipe(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def close(self) -> None:
        """The server has ended: so does a successor that does not serve yet."""
        if self._successor is not None and not self.is_due:
            self._successor.terminate()
            self._end_successor()
        self._close_pipe()

    def become_next(self) -> None:
        """At the end of a server that was replaced: this process becomes the next one, or waits for it. Returns if it
        was not replaced, or if a process waits for the next one already."""
        if not self.is_due:
            return
        if self._take_over is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, waiter.FORWARDED)  # until the next program handles them
            if self._is_stopped:
                return
            for fd in (*self._take_over.listeners, *self._take_over.admins):
                os.set_inheritable(fd, True)
            os.execve(self._command[0], self._command, os.environ | self._take_over.environ())
        elif not self._is_successor and self._successor is not None:
            waiter.adopt_orphans()
            signal.pthread_sigmask(signal.SIG_BLOCK, waiter.FORWARDED)
            os.execv(sys.executable, [sys.executable, "-I", "-S", str(Path(waiter.__file__)), str(self._successor.pid)])
