"""Decodes images in a separate process (pipeline/media/decoder.py), which starts with the first one. Images wait here
for a child of that process, in a queue that is fair to the API keys. Decoded ones are cached."""

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from pipeline.media.config import MEDIA
from pipeline.media.jobs import Decoded, DecodeJob, key_of
from pipeline.media.limits import LIMITS, ImageLimits
from pipeline.metrics.media_stats import ImageCounts
from pipeline.runtime.messages import Failure
from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.process import suspension
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.runtime.workers.job_dispatcher import JobDispatcher
from pipeline.runtime.workers.worker import WorkerLostError
from pipeline.stages.ingest.media.image_cache import DecodedImage, ImageCache, mapped
from pipeline.stages.ingest.prompts.rejection import RequestRejected

P = ParamSpec("P")
T = TypeVar("T")

NUM_WORKERS = 3
"""Images that are decoded at a time; those of one API key take all but one, because each may take TIMEOUT_S."""
TIMEOUT_S = 10.0
CACHE_BYTES = 256 * 1024**2
LARGE_BYTES = 64 * 1024
"""From here on, a thread hashes and copies an image: 1.1 ms for each MiB."""
NUM_COPIES = 2
"""Large images that are hashed or copied at a time."""

WAIT_S = 60.0
"""Longest time of an image, including the start of the process and the images before it."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


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
        self._limits = limits
        self._config = read_file(model_dir / MEDIA)
        self._cache = ImageCache(cache_bytes)
        self._asked: dict[bytes, asyncio.Event] = {}
        """Set when an image was decoded, or can't be. By key."""
        self._num_queries = self._num_hits = self._num_rejected = 0
        self._decode_s = 0.0
        self._pool = WorkPool("copying images", max_threads=NUM_COPIES)
        self._dispatcher = JobDispatcher(
            "pipeline.media.decoder",
            title,
            [str(model_dir), str(num_workers), str(timeout_s)],
            Decoded,
            FairGate(num_workers, max(1, num_workers - 1)),
            WAIT_S,
        )

    async def decode(self, data: bytes, param: str, *, detail: str = "", scope: str = "") -> DecodedImage:
        """Decode and process an encoded image; `param` is the field that has it, and `scope` is whose it is. The
        caller has images of one request decoded one after the other. Raises RequestRejected."""
        if len(data) > self._limits.max_bytes:
            raise _rejection(f"has {len(data)} bytes; the limit is {self._limits.max_bytes}", param)
        key = await self._run_large(len(data), key_of, "image", self._config, detail, scope, data)
        self._num_queries += 1
        while (found := self._cache.get(key)) is None:
            if (over := self._asked.get(key)) is not None:
                await self._wait(over, param)
                continue
            self._asked[key] = over = asyncio.Event()
            try:
                found = await self._timed(self._decoded(key, data, param, scope))
                self._cache.put(found)
                return found
            finally:
                del self._asked[key]
                over.set()
        self._num_hits += 1
        return found

    async def _timed(self, decoded: Awaitable[DecodedImage]) -> DecodedImage:
        began_s = time.monotonic()
        try:
            return await decoded
        except RequestRejected:
            self._num_rejected += 1
            raise
        finally:
            self._decode_s += time.monotonic() - began_s

    def counts(self) -> ImageCounts:
        """Since the start."""
        totals = self._num_queries, self._num_hits, self._num_rejected
        return ImageCounts(*totals, self._decode_s, self._cache.num_bytes)

    async def _wait(self, over: asyncio.Event, param: str) -> None:
        due_s = asyncio.get_running_loop().time() + WAIT_S
        try:
            async with asyncio.timeout_at(due_s):
                await over.wait()
        except TimeoutError:
            if not suspension.missed(due_s):
                raise _busy(param) from None

    async def _decoded(self, key: bytes, data: bytes, param: str, scope: str) -> DecodedImage:
        with contextlib.ExitStack() as memories:
            fd = -1

            async def make_job(number: int) -> tuple[bytes, Sequence[int]]:
                nonlocal fd
                memories.close()  # of a process that has ended
                fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                memories.callback(os.close, fd)
                await self._run_large(len(data), _write_all, fd, data)
                job = DecodeJob(number, len(data), self._limits, time.monotonic())
                return msgspec.msgpack.encode(job), [fd]

            try:
                answer = await self._dispatcher.query(scope, len(data), make_job)
            except WorkerLostError:
                raise _busy(param) from None
            if answer.error:
                raise _rejection(answer.error, param) if answer.is_final else _busy(param)
            return _sealed(key, answer, fd, param)

    async def _run_large(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long for a large image: then in a thread, and to its end."""
        if num_bytes < LARGE_BYTES:
            return function(*args, **kwargs)
        return await self._pool.run_to_end(function, *args, **kwargs)

    def close(self) -> None:
        self._dispatcher.close()


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
