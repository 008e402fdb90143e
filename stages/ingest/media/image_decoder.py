"""Decodes images in a separate process (pipeline/media/decoder.py), which starts with the first one. Images wait here
for a child of that process, in a queue that is fair to the API keys. Decoded ones are cached."""

import asyncio
import fcntl
import functools
import importlib.util
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from pipeline.media.config import MEDIA
from pipeline.media.jobs import Decoded, DecodeJob, key_of
from pipeline.media.limits import LIMITS, ImageLimits
from pipeline.runtime.messages import Failure
from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.process import suspension
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.runtime.workers.worker import LENGTH, Worker
from pipeline.stages.ingest.media.image_cache import DecodedImage, ImageCache, mapped
from pipeline.stages.ingest.prompts.rejection import RequestRejected

P = ParamSpec("P")
T = TypeVar("T")

NUM_WORKERS = 2
TIMEOUT_S = 10.0
CACHE_BYTES = 256 * 1024**2
LARGE_BYTES = 64 * 1024
"""From here on, a thread hashes and copies an image: 1.1 ms for each MiB."""
NUM_COPIES = 2
"""Large images that are hashed or copied at a time."""

WAIT_S = 60.0
"""Longest time of an image, including the start of the process and the images before it."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@functools.cache
def has_pillow() -> bool:
    """Whether the extra `media` is installed. It is not imported here."""
    return importlib.util.find_spec("PIL") is not None


class ImageDecoder:
    """Owns the process and the cache. `model_dir` is a prepared folder with `media.json`."""

    def __init__(
        self,
        model_dir: Path,
        title: str = "pipeline: media",
        *,
        limits: ImageLimits = LIMITS,
        num_workers: int = NUM_WORKERS,
        timeout_s: float = TIMEOUT_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._model_dir, self._title = model_dir, title
        self._limits, self._num_workers, self._timeout_s = limits, num_workers, timeout_s
        self._config = read_file(model_dir / MEDIA)
        self._cache = ImageCache(cache_bytes)
        self._asked: dict[bytes, asyncio.Event] = {}
        """Set when an image was decoded, or can't be. By key."""
        self._pool = WorkPool("copying images", max_threads=NUM_COPIES)
        self._gate = FairGate(num_workers, num_workers)
        self._answers: dict[int, tuple[asyncio.Future[Decoded], str]] = {}
        """Of the images in the process, with their scope. A cancelled one keeps its place until its answer."""
        self._worker: Worker | None = None
        self._sender: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        """Held while the process starts, so that concurrent images share it."""
        self._answered_s = 0.0
        """When the last answer came, or the process was started."""
        self._number = 0
        self._is_closed = False

    async def decode(self, data: bytes, param: str, *, detail: str = "", scope: str = "") -> DecodedImage:
        """Decode and process an encoded image; `param` is the field that has it, and `scope` is whose it is. The
        caller has images of one request decoded one after the other. Raises RequestRejected."""
        if len(data) > self._limits.max_bytes:
            raise _rejection(f"has {len(data)} bytes; the limit is {self._limits.max_bytes}", param)
        if not has_pillow():
            message = "this server can't decode images: it was installed without the extra 'media' (Pillow)"
            raise RequestRejected(Failure(400, message, param, "unsupported"))
        key = await self._run_large(len(data), key_of, "image", self._config, detail, scope, data)
        while (found := self._cache.get(key)) is None:
            if (over := self._asked.get(key)) is not None:
                await self._wait(over, param)
                continue
            self._asked[key] = over = asyncio.Event()
            try:
                found = await self._decoded(key, data, param, scope)
                self._cache.put(found)
                break
            finally:
                del self._asked[key]
                over.set()
        return found

    async def _wait(self, over: asyncio.Event, param: str) -> None:
        due_s = asyncio.get_running_loop().time() + WAIT_S
        try:
            async with asyncio.timeout_at(due_s):
                await over.wait()
        except TimeoutError:
            if not suspension.missed(due_s):
                raise _busy(param) from None

    async def _decoded(self, key: bytes, data: bytes, param: str, scope: str) -> DecodedImage:
        due_s = asyncio.get_running_loop().time() + WAIT_S
        try:
            async with asyncio.timeout_at(due_s):
                return await self._query_twice(key, data, param, scope)
        except TimeoutError:
            if suspension.missed(due_s):
                return await self._decoded(key, data, param, scope)
            if time.monotonic() - self._answered_s >= WAIT_S:  # else it answers others
                self._stop("does not answer")
            raise _busy(param) from None
        except ConnectionError:
            raise _busy(param) from None

    async def _query_twice(self, key: bytes, data: bytes, param: str, scope: str) -> DecodedImage:
        """Query a new process if the first one ends. Raises ConnectionError if that ends too, or this was closed."""
        try:
            return await self._query(key, data, param, scope)
        except ConnectionError:
            return await self._query(key, data, param, scope)

    async def _query(self, key: bytes, data: bytes, param: str, scope: str) -> DecodedImage:
        await self._gate.enter(scope, len(data))
        fd = -1
        try:
            fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            await self._run_large(len(data), _write_all, fd, data)
            sender = await self._started()
            self._number += 1
            job = msgspec.msgpack.encode(DecodeJob(self._number, len(data), self._limits, time.monotonic()))
            # The process has read all but the last few jobs, so this never waits.
            socket.send_fds(sender, [LENGTH.pack(len(job)) + job], [fd])
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            self._gate.leave(scope)
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise ConnectionError("the process that decodes images can't be reached") from error
            raise
        try:
            future: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()
            self._answers[self._number] = future, scope
            answer = await future
            if answer.error:
                raise _rejection(answer.error, param) if answer.is_final else _busy(param)
            return _sealed(key, answer, fd, param)
        finally:
            os.close(fd)

    async def _run_large(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long for a large image: then in a thread, and to its end."""
        if num_bytes < LARGE_BYTES:
            return function(*args, **kwargs)
        return await self._pool.run_to_end(function, *args, **kwargs)

    async def _started(self) -> socket.socket:
        """The socket to the process. Raises ConnectionError."""
        if not self._is_closed:
            async with self._starting:
                if self._worker is None or self._sender is None or not self._worker.is_alive:
                    await self._start()
        if self._is_closed or self._sender is None:
            raise ConnectionError("the process that decodes images was stopped")
        return self._sender

    async def _start(self) -> None:
        self._stop("ended")
        args = [str(self._model_dir), str(self._num_workers), str(self._timeout_s)]
        self._worker = Worker("pipeline.media.decoder", self._title, args)
        self._sender = self._worker.socket.dup()
        self._sender.setblocking(False)
        own = socket.socket(fileno=self._worker.socket.detach())
        try:
            stream, writer = await asyncio.open_unix_connection(sock=own)
        except BaseException:
            own.close()
            raise
        self._answered_s = time.monotonic()
        self._reader = asyncio.get_running_loop().create_task(self._read(stream, writer))

    async def _read(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(Decoded)
        try:
            while True:
                (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                answer = decoder.decode(await stream.readexactly(length))
                self._answered_s = time.monotonic()
                future, scope = self._answers.pop(answer.number)
                self._gate.leave(scope)
                if not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._sender is not None:  # the process may still seem alive
                self._sender.close()
                self._sender = None
            self._fail("ended")
        finally:
            writer.close()

    def _fail(self, how: str) -> None:
        answers, self._answers = self._answers, {}
        for future, scope in answers.values():
            self._gate.leave(scope)
            if not future.done():
                future.set_exception(ConnectionError(f"the process that decodes images {how}"))

    def _stop(self, how: str) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._fail(how)

    def close(self) -> None:
        self._is_closed = True
        self._stop("was stopped")


def _sealed(key: bytes, answer: Decoded, fd: int, param: str) -> DecodedImage:
    """The image in a memfd, which no process can change from now on: a fault in a library may have run a client's code.
    Raises RequestRejected if it is not what the answer says."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return mapped(key, answer, fd)
    except (OSError, ValueError) as error:
        raise _rejection("can't be decoded", param) from error


def _write_all(fd: int, data: bytes) -> None:
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], written)


def _rejection(why: str, param: str) -> RequestRejected:
    return RequestRejected(Failure(400, f"the image '{param}' {why}", param, "invalid_image"))


def _busy(param: str) -> RequestRejected:
    return RequestRejected(
        Failure(503, f"the image '{param}' could not be decoded in time: try again", param, "overloaded")
    )
