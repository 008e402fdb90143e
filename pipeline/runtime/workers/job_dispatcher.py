"""The owner's side of a process that runs jobs in children (forked_jobs.py). The process starts with the first job.

query(scope) ──FairGate──► the job is made and sent ──► its answer
                           ▲ a new process, if the first one ends: once for each job
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from pipeline.runtime.process import suspension
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.workers.worker import LENGTH, Worker, WorkerLostError


class NumberedAnswer(Protocol):
    @property
    def number(self) -> int:
        """That of the job."""


A = TypeVar("A", bound=NumberedAnswer)

MakeJob = Callable[[int], Awaitable[tuple[bytes, Sequence[int]]]]
"""Makes the job with this number: encoded, and the descriptors that go with it."""


class JobDispatcher(Generic[A]):
    """Owns the process. Belongs to one event loop."""

    def __init__(
        self, program: str, title: str, args: Sequence[str], answer: type[A], gate: FairGate, wait_s: float
    ) -> None:
        """The first three are as in `Worker`. `gate` bounds the jobs in the process, so that they don't wait there;
        `wait_s` is the longest time of a job, including the start of the process and the jobs before it."""
        self._program, self._title, self._args = program, title, args
        self._decoder = msgspec.msgpack.Decoder(answer)
        self._gate, self._wait_s = gate, wait_s
        self._answers: dict[int, tuple[asyncio.Future[A], str]] = {}
        """Of the jobs in the process, with their scope. A cancelled one keeps its place until its answer."""
        self._worker: Worker | None = None
        self._stream: asyncio.StreamWriter | None = None
        self._sender: socket.socket | None = None
        """Of the same connection, for jobs with descriptors."""
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        """Held while the process starts, so that concurrent jobs share it."""
        self._answered_s = 0.0
        """When the last answer came, or the process was started."""
        self.num_jobs = 0
        """Jobs that were made."""
        self._is_closed = False

    async def query(self, scope: str, cost: int, make_job: MakeJob) -> A:
        """The answer to a job. `scope` and `cost` are as in `FairGate.enter`. `make_job` is called when the job has its
        turn, and again if the process ends. A job with descriptors must be small: it is sent at once or not at all.

        Raises WorkerLostError if there is no answer in time, a second process ends too, or this was closed."""
        due_s = asyncio.get_running_loop().time() + self._wait_s
        try:
            async with asyncio.timeout_at(due_s):
                try:
                    return await self._query(scope, cost, make_job)
                except WorkerLostError:  # killed, or stopped because of another job
                    return await self._query(scope, cost, make_job)
        except TimeoutError:
            if suspension.missed(due_s):
                return await self.query(scope, cost, make_job)
            if time.monotonic() - self._answered_s >= self._wait_s:  # else it answers others
                self._stop()
            raise WorkerLostError from None

    async def _query(self, scope: str, cost: int, make_job: MakeJob) -> A:
        await self._gate.enter(scope, cost)
        try:
            await self._start_if_needed()
            self.num_jobs += 1
            number = self.num_jobs
            stream = self._send(*await make_job(number))
        except BaseException as error:
            self._gate.leave(scope)
            if isinstance(error, OSError):
                raise WorkerLostError from error
            raise
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._answers[number] = future, scope
        try:
            await stream.drain()
            return await future
        except ConnectionError as error:
            raise WorkerLostError from error
        finally:
            future.cancel()

    def _send(self, job: bytes, fds: Sequence[int]) -> asyncio.StreamWriter:
        """Send a job by the stream, which is to be drained. Raises OSError."""
        if self._stream is None or self._sender is None:
            raise ConnectionError("the process ended, or was stopped, while the job was made")
        data = LENGTH.pack(len(job)) + job
        if fds:
            socket.send_fds(self._sender, [data], fds)
        else:
            self._stream.write(data)
        return self._stream

    async def _start_if_needed(self) -> None:
        """Raises WorkerLostError if this was closed."""
        if not self._is_closed:
            async with self._starting:
                if self._worker is None or self._stream is None or not self._worker.is_alive:
                    await self._start()
        if self._is_closed:
            raise WorkerLostError

    async def _start(self) -> None:
        self._stop()
        self._worker = Worker(self._program, self._title, self._args)
        self._sender = self._worker.socket.dup()
        self._sender.setblocking(False)
        own = socket.socket(fileno=self._worker.socket.detach())
        try:
            reader, self._stream = await asyncio.open_unix_connection(sock=own)
        except BaseException:
            own.close()
            raise
        self._answered_s = time.monotonic()
        self._reader = asyncio.get_running_loop().create_task(self._read(reader))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                answer = self._decoder.decode(await stream.readexactly(length))
                self._answered_s = time.monotonic()
                future, scope = self._answers.pop(answer.number)
                self._gate.leave(scope)
                if not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._disconnect()  # the process may still seem alive

    def _disconnect(self) -> None:
        """Close the connection. Those who wait for answers get WorkerLostError."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        answers, self._answers = self._answers, {}
        for future, scope in answers.values():
            self._gate.leave(scope)
            if not future.done():
                future.set_exception(WorkerLostError())

    def _stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._disconnect()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._is_closed = True
        self._stop()
