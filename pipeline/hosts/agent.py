"""The agent of a host: starts and watches the processes that a supervisor on another host asks for.

    made: listens, has keys ──► HostFound ──► run: Spawn, EndChild, Ping ──► ChildStarted, ChildEnded, HostPong
                                                └──► Stop, or silence of the supervisor: kills its processes and ends

It owns what processes of one host share and what outlives them: listening sockets, black boxes, the memory of ranks.
Its processes end with it, however it ends: they watch a pipe, and the kernel sends them SIGKILL when the thread ends
that started them. So `run` must be called on the main thread.
"""

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.messages.wire_version import wire_version
from pipeline.runtime.model import model_folder
from pipeline.runtime.process import black_box
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport import curve
from pipeline.runtime.transport.curve import ClientKeys
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm import segment
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.version import VERSION

POLL_S = 1.0
"""Deadlines are checked at least this often."""
BOUND = 1024
"""Maximum number of messages that may wait for the supervisor."""
FLUSH_S = 1.0
MAX_STACKS_BYTES = 256 * 1024


class HostAgent:
    """Serves one supervisor."""

    def __init__(self, orders: m.HostOrders, node: str, host: str) -> None:
        """`node` is the name of this host for people, `host` its address where the processes listen, if the orders give
        none. Raises UserError if this host has other code, or can't listen."""
        if wire_version() != orders.wire_version:
            raise UserError(f"{node} has other code than the supervisor: Pipeline {VERSION} is installed there")
        self._orders = orders
        self._log = logging.getLogger("pipeline")
        keys = curve.new_keys()
        host = orders.listen_host or host
        self._own = curve.listen(host, orders.ports, "transport.ports")
        self._listeners: dict[str, socket.socket] = {}
        for name in orders.processes:
            self._listeners[name] = curve.listen(host, orders.ports, "transport.ports")
        self._death_read, self._death_write = os.pipe()
        self._library_fds: dict[str, int] = {}
        self._ranks = (0, -1)
        """The memory that ranks share: its group, and its descriptor."""
        self._children: dict[str, ChildProcess] = {}
        self._model: BinaryIO | None = None
        """Marks the model's folder as used."""
        self._boxes: BlackBoxes | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        tcp = m.Tcp(
            *keys, {SUPERVISOR: orders.supervisor.public_key}, curve.address_of(self._own), os.dup(self._own.fileno())
        )
        self._inbox: Inbox[m.HostInbox] = Inbox(self._context, tcp.address, m.HostInbox, tcp=tcp)
        self._keys = keys
        self._supervisor: Outbox[m.SupervisorInbox] | None = None
        """Made at its first message: then it knows our key."""
        addresses = [curve.address_of(self._listeners[name]) for name in orders.processes]
        self.found = m.HostFound(orders.name, node, tcp.address, keys.public_key, addresses)
        """For the supervisor, before it can be reached."""

    def run(self) -> None:
        """Serve until `Stop`, or until the supervisor is silent for too long."""
        assert threading.current_thread() is threading.main_thread(), "processes end with the thread that starts them"
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide the exit codes of ours
        heard_s = time.monotonic()
        try:
            while time.monotonic() < heard_s + self._orders.timeout_s:
                while (message := self._inbox.receive()) is not None:
                    heard_s = time.monotonic()
                    self._connect()
                    if isinstance(message, m.Stop):
                        return
                    self._handle(message)
                self._report_ended()
                self._wait()
            self._log.error(f"{self._orders.name} hears nothing from its supervisor; ending")
        finally:
            self.close()

    def _connect(self) -> None:
        if self._supervisor is None:
            orders = self._orders
            self._supervisor = Outbox(
                self._context,
                orders.supervisor.address,
                m.Envelope(orders.name, orders.incarnation),
                BOUND,
                keys=ClientKeys(orders.supervisor.public_key, self._keys),
            )

    def _send(self, message: m.HostReport) -> None:
        assert self._supervisor is not None, "it has asked for nothing yet"
        self._supervisor.send(message)

    def _wait(self) -> None:
        if self._inbox.wait(0):
            return  # its descriptor is edge-triggered, so check before sleeping
        poller = zmq.Poller()
        for fd in (self._inbox.fileno(), *(child.pidfd for child in self._children.values())):
            poller.register(fd, zmq.POLLIN)
        poller.poll(round(POLL_S * 1000))

    def _handle(self, message: m.Spawn | m.EndChild | m.Ping) -> None:
        match message:
            case m.Spawn():
                self._spawn(message)
            case m.EndChild(name, incarnation, abort):
                child = self._children.get(name)
                if child is None or child.incarnation != incarnation:
                    return
                if abort:
                    child.abort()
                else:
                    child.kill()
            case m.Ping(nonce):
                usages = [(name, child.usage()) for name, child in self._children.items()]
                self._send(
                    m.HostPong(
                        nonce, [m.ChildUsage(name, one.rss_bytes, one.cpu_s, one.num_threads) for name, one in usages]
                    )
                )

    def _spawn(self, order: m.Spawn) -> None:
        launch = order.launch
        self._forget(launch.name)
        if launch.stage == "execute" and self._model is None:
            self._model = model_folder.hold(Path(launch.model_dir))
        tcp = launch.tcp
        if tcp is not None and (listener := self._listeners.get(launch.name)) is not None:
            tcp = msgspec.structs.replace(tcp, address=curve.address_of(listener), listen_fd=listener.fileno())
        launch = msgspec.structs.replace(
            launch,
            death_fd=self._death_read,
            tcp=tcp,
            address=launch.address if tcp is None or not tcp.address else tcp.address,
            ranks_fd=self._ranks_of(order) if launch.stage == "execute" else -1,
            library_fd=self._library_fd(launch.name) if launch.stage == "execute" else -1,
            black_box=self._black_boxes(launch.settings).create(launch.name, launch.incarnation),
        )
        child = ChildProcess(launch, order.num_threads or len(os.sched_getaffinity(0)))
        self._children[child.name] = child
        self._send(m.ChildStarted(child.name, child.incarnation, child.pid))

    def _ranks_of(self, order: m.Spawn) -> int:
        """The memory that the ranks of this group share. A new group has new memory."""
        if order.launch.settings.execute.tensor_parallel == 1:
            return -1
        group, fd = self._ranks
        if group != order.group:
            if fd >= 0:
                os.close(fd)
            self._ranks = order.group, segment.create_sparse("ranks", 0)
        return self._ranks[1]

    def _library_fd(self, name: str) -> int:
        """Memory for the kernels' library of an executor."""
        if name not in self._library_fds:
            self._library_fds[name] = segment.create_sparse(f"library-{name}", 0)
        return self._library_fds[name]

    def _black_boxes(self, settings: Settings) -> BlackBoxes:
        if self._boxes is None:
            supervisor = msgspec.structs.replace(settings.supervisor, crash_recording_bytes=0)
            self._boxes = BlackBoxes(msgspec.structs.replace(settings, supervisor=supervisor))
        return self._boxes

    def _report_ended(self) -> None:
        for child in list(self._children.values()):
            code = child.exit_code
            if code is None:
                continue
            box = None if self._boxes is None else self._boxes.get(child.name, child.incarnation)
            left = (b"", b"") if box is None else (black_box.stacks(box, MAX_STACKS_BYTES), black_box.memory_of(box))
            self._send(m.ChildEnded(child.name, child.incarnation, code, *left))
            self._forget(child.name)

    def _forget(self, name: str) -> None:
        """Kill a process, if there is one of this name."""
        if (child := self._children.pop(name, None)) is not None:
            child.close()

    def close(self) -> None:
        """Kill all processes, and free everything."""
        for name in list(self._children):
            self._forget(name)
        if self._supervisor is not None:
            self._supervisor.flush(FLUSH_S)
        self._inbox.close()
        for listener in (self._own, *self._listeners.values()):
            listener.close()
        if self._boxes is not None:
            self._boxes.close()
        if self._model is not None:
            self._model.close()
        for fd in self._library_fds.values():
            os.close(fd)
        if self._ranks[1] >= 0:
            os.close(self._ranks[1])
        os.close(self._death_read)
        os.close(self._death_write)
        self._context.term()
