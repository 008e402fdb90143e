"""The process of the gateway of several models: one loop, one listener, and a `GatewayStage` for each model that is
loaded, which the supervisor begins and ends.

    supervisor ──StartStage──► this process ──► a stage with its own channels to the model's other stages
    client ──HTTP──► ModelsApp ──► the stage of the model
    client ──ZeroMQ──► ZmqServer ──► the stage of the connection's model
"""

import array
import asyncio
import contextlib
import gc
import logging
import os
import socket

import uvloop

from pipeline.client.connection.zmq_address import address_of
from pipeline.errors import UserError
from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.listener import HttpListener
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.sockets import descriptors
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.child import report_failure
from pipeline.runtime.log.log_file import dropped_log
from pipeline.runtime.messages.models import (
    MAX_FDS,
    MAX_PACKET_BYTES,
    DropStage,
    Models,
    ReleaseModel,
    StartStage,
    StopProcess,
    ToSharedGateway,
)
from pipeline.runtime.process import heap
from pipeline.runtime.process.descriptors import renumbered
from pipeline.runtime.queues.work_pool import WorkPool, share_interpreter
from pipeline.runtime.stage import Stage
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.admission.unread import unread_replies
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.models.app import ModelsApp
from pipeline.stages.gateway.models.packet_sender import PacketSender
from pipeline.stages.gateway.models.table import ModelTable
from pipeline.stages.gateway.replayed import SHUTTING_DOWN
from pipeline.stages.gateway.stage import GatewayStage
from pipeline.stages.gateway.zmq.bind import until_free
from pipeline.stages.gateway.zmq.server import ZmqServer

FLUSH_S = 5.0
"""How often the log counts refusals that it left out."""
COLLECT_S = 1.0
"""After a model was unloaded."""


MAX_CLOSING = 8
"""Stages that end at the same time; others wait for one of them, which sends its last messages."""


def run(launch: m.Launch) -> None:
    """Run the process until `StopProcess`, or until the supervisor's socket closes."""
    share_interpreter()
    heap.unmap_large_blocks()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        descriptors.raise_limit(topology.max_open_of_one(launch.settings), logging.getLogger("pipeline"))
        runner.run(ModelGateways(launch).serve())


class ModelGateways:
    """The listeners, and the stages of the models that are loaded: `SharedListener` of each."""

    def __init__(self, launch: m.Launch) -> None:
        self._launch = launch
        self._log = logging.getLogger("pipeline")
        self._socket = socket.socket(fileno=launch.models_fd)
        self._socket.setblocking(False)
        self._decoder: MessageDecoder[ToSharedGateway] = MessageDecoder(ToSharedGateway)
        self._accounts = KeyAccounts.inherited(launch.keys_fd, launch.usage_fd, 0)
        self.rejection_log = RejectionLog(self._log)
        self.access_log = AccessLog.of(launch.settings.access_log, self._accounts.name_of)
        self._dropped_log = dropped_log(self._log)
        self._sender = PacketSender(self._socket)
        self._table = ModelTable(self._accounts, self._sender.send, launch.settings.gateway)
        self._app = ModelsApp(self._table, launch.settings, self._accounts)
        self._unread = unread_replies(launch.settings, self._log)
        self._stages: dict[int, asyncio.Task[None]] = {}
        """By the supervisor's number."""
        self._blocking = WorkPool("closing stages", max_threads=MAX_CLOSING)
        self._reading = WorkPool("reading models")
        self._is_stopped = asyncio.Event()
        self._may_listen = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._http: list[HttpListener] = []
        self._http_port = 0
        self._zmq_server: ZmqServer | None = None

    async def serve(self) -> None:
        """Listen, and have stages until the process is asked to end."""
        loop = asyncio.get_running_loop()
        if not self._launch.takes_over:
            await self._start_http()
        heap.freeze()
        loop.add_reader(self._socket.fileno(), self._receive)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._launch.takes_over:
                    tasks.create_task(self._take_over(tasks))
                else:
                    await self._start_zmq_server(tasks)
                while not self._is_stopped.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(FLUSH_S):
                            await self._is_stopped.wait()
                    self._flush()
                if self._zmq_server is not None:
                    self._zmq_server.fail_all(SHUTTING_DOWN)
                    self._zmq_server.close()
        finally:
            if self._zmq_server is not None:
                self._zmq_server.close()
                await self._zmq_server.wait_closed()
            loop.remove_reader(self._socket.fileno())
            self._sender.close()
            for task in self._stages.values():
                task.cancel()
            await asyncio.gather(*self._stages.values(), return_exceptions=True)
            for listener in self._http:
                await listener.cleanup()
            self._accounts.close()
            self._socket.close()
            if self.access_log is not None:
                self.access_log.writer.close()

    async def _start_http(self) -> None:
        settings = self._launch.settings
        self._http_port, self._http = self._app.listeners(
            self._launch, settings, self._accounts.keys, self._unread, self.rejection_log, self.access_log
        )
        for listener in self._http:
            await listener.start()

    async def _take_over(self, tasks: asyncio.TaskGroup) -> None:
        """Listen at the sockets of the server that this one replaces, when the models of the start are loaded."""
        await self._may_listen.wait()
        if not self._is_stopped.is_set():
            await self._start_http()
        if not self._is_stopped.is_set() and (address := self._zmq_address()) is not None:
            free = asyncio.create_task(until_free(address))
            stopped = asyncio.create_task(self._is_stopped.wait())
            await asyncio.wait((free, stopped), return_when=asyncio.FIRST_COMPLETED)
            free.cancel()
            stopped.cancel()
            if not self._is_stopped.is_set():
                await self._start_zmq_server(tasks)

    async def _leave_sockets(self) -> None:
        """Another server listens at them from now on."""
        if self._zmq_server is not None:
            self._zmq_server.leave()
        for listener in self._http:
            await listener.stop()

    def _zmq_address(self) -> str | None:
        return address_of(self._launch.settings.gateway.zmq, self._http_port)

    async def _start_zmq_server(self, tasks: asyncio.TaskGroup) -> None:
        """Listen for ZeroMQ clients. Raises UserError if it can't listen on the address."""
        gateway = self._launch.settings.gateway
        if (address := self._zmq_address()) is not None:
            self._zmq_server = ZmqServer(
                address,
                self._table.of_connection,
                self._accounts,
                gateway.max_body_bytes,
                tasks,
                self._unread,
                self._accounts.keys,
                needs_key=address.startswith("tcp://"),  # only processes of this user can connect to ipc
                access_log=self.access_log,
            )
            await self._zmq_server.start()

    def _flush(self) -> None:
        self.rejection_log.flush()
        if self.access_log is not None:
            self.access_log.writer.report(self._dropped_log)

    # ---------------------------------------------------------------------------------------------------- supervisor

    def _receive(self) -> None:
        """Handle the supervisor's packets."""
        while True:
            try:
                data, fds = _receive_packet(self._socket)
            except BlockingIOError:
                return
            if not data:  # the supervisor is gone
                self._stop()
                return
            match self._decoder.decode(data):
                case StartStage() as message:
                    self._stages[message.number] = asyncio.create_task(self._serve_stage(message, fds))
                case DropStage(number):
                    if (task := self._stages.get(number)) is not None:
                        task.cancel()
                case Models() as models:
                    self._table.update(models)
                    if models.is_ready:
                        self._may_listen.set()
                    if models.has_successor and self._leaving is None:
                        self._leaving = asyncio.create_task(self._leave_sockets())
                case ReleaseModel(name):
                    self._table.release(name)
                case StopProcess():
                    self._stop()

    def _stop(self) -> None:
        self._is_stopped.set()
        self._may_listen.set()

    async def _serve_stage(self, message: StartStage, fds: list[int]) -> None:
        """Run a stage until it is stopped. The last descriptor tells the supervisor that it has ended."""
        numbers = dict(zip(message.fds, fds, strict=False))
        launch, end_fd = renumbered(message.launch, numbers), fds[-1]
        try:
            await self._run(launch)
            os.write(end_fd, b"0")
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - ends this model's stage, and not those of the others
            reason = str(error) or type(error).__name__
            if not isinstance(error, UserError):
                self._log.exception("failed")
            await self._blocking.run(report_failure, launch, reason)
        finally:
            del self._stages[message.number]
            box = launch.black_box.fds if launch.black_box is not None else []
            for fd in (launch.keys_fd, launch.usage_fd, *box, end_fd):
                if fd >= 0:
                    os.close(fd)

    async def _run(self, launch: m.Launch) -> None:
        stage: Stage[m.GatewayInbox] = open_stage(launch, m.GatewayInbox)  # first: it owns the launch's descriptors
        try:
            model = await self._reading.run(ServedModel.load, stage.model_dir, stage.settings)
            gateway = GatewayStage(stage, model, self)
            self._table.add(launch.model, gateway)
            try:
                await gateway.serve()
            finally:
                self._table.remove(launch.model, gateway)
        finally:
            await self._blocking.run(stage.close)  # it waits for messages to be sent
            del stage
            asyncio.get_running_loop().call_later(COLLECT_S, _collect)

    # ------------------------------------------------------------------------------------------- the shared listener

    def fail_streams(self, gateway: GatewayStage, error: ApiError) -> None:
        """End the streams over ZeroMQ of one model."""
        if self._zmq_server is not None:
            self._zmq_server.fail_all(error, gateway)

    def server_ends(self) -> bool:
        return self._table.is_ending or self._is_stopped.is_set()

    def on_change(self) -> None:
        self._table.changed()


def _collect() -> None:
    """Free what an ended stage has left."""
    gc.collect()


def _receive_packet(from_supervisor: socket.socket) -> tuple[bytes, list[int]]:
    """A packet and its descriptors. Raises BlockingIOError."""
    data, ancillary, _, _ = from_supervisor.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, part in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)
