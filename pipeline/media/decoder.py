"""The media process of ingest: it decodes and processes clients' images. Each image has a child of its own
(pipeline/runtime/workers/forked_jobs.py), in which Pillow is loaded; it is killed when its time is up."""

import contextlib
import gc
import os
import resource
import socket
import traceback
from pathlib import Path

import msgspec

from pipeline.media import config as media
from pipeline.media import images, processors
from pipeline.media.config import MediaConfig
from pipeline.media.jobs import Decoded, DecodeJob
from pipeline.media.processed import InvalidImage
from pipeline.runtime.workers.forked_jobs import Ended, ForkedJobs
from pipeline.runtime.workers.worker import LENGTH, WorkerLostError, receive_exactly, send

MAX_BYTES = 2 * 1024**3
"""Maximum memory of a child, in addition to the memory of this process. The largest image takes 1.2 GB if it is turned
and has alpha."""

PRIORITY = 19
"""The nice value of a child. The executor's threads wait for each other many times in a step, so each turn that a child
takes from one of them delays all. At this value, it computes when they don't, or gets about 1.5 % of a core."""

MAX_EXTENDED_S = 300.0
"""Maximum duration of a job that gets little CPU time because of its priority. A photo of 12 megapixels takes 0.15 s of
it, and a child had 0.25 s within a minute on two cores with sixteen other processes that wanted them."""

STDERR = 2

MAX_PIXEL_BYTES = 256 * 1024**2
"""Of a processed image."""


class OpenJob:
    """A job and its memfd, which this process closes when the job has ended."""

    def __init__(self, job: DecodeJob, fd: int) -> None:
        self.job, self.fd, self.asked_s = job, fd, job.asked_s


class MediaDecoder(ForkedJobs[OpenJob]):
    def __init__(self, ingest: socket.socket, config: MediaConfig, num_workers: int, timeout_s: float) -> None:
        super().__init__(ingest, num_workers, timeout_s, MAX_BYTES, MAX_EXTENDED_S)
        self._socket, self._config, self._timeout_s = ingest, config, timeout_s
        self._decoder = msgspec.msgpack.Decoder(DecodeJob)

    def next_job(self) -> OpenJob:
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, LENGTH.size, 1)
        except OSError as error:
            raise WorkerLostError from error
        if not fds:
            raise WorkerLostError
        head += receive_exactly(self._socket, LENGTH.size - len(head))
        return OpenJob(self._decoder.decode(receive_exactly(self._socket, *LENGTH.unpack(head))), fds[0])

    def descriptors(self, job: OpenJob) -> tuple[int, ...]:
        return (job.fd,)

    def run(self, job: OpenJob) -> bytes:
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_PIXEL_BYTES, MAX_PIXEL_BYTES))
        return msgspec.msgpack.encode(decoded(job.job, job.fd, self._config))

    def ended(self, end: Ended[OpenJob]) -> None:
        os.close(end.job.fd)
        try:
            answer = msgspec.msgpack.decode(end.answer, type=Decoded)
        except msgspec.DecodeError:  # the child died before its answer was complete
            answer = Decoded(end.job.job.number, self._failure(end), end.is_final)
        send(self._socket, msgspec.msgpack.encode(msgspec.structs.replace(answer, took_s=end.cpu_s)))

    def _failure(self, end: Ended[OpenJob]) -> str:
        if end.is_late:
            return f"takes longer than {self._timeout_s:g} s to decode"
        if end.signal_name:
            return f"can't be decoded: the process that decodes it was ended by {end.signal_name}"
        return "takes too much memory to decode" if end.lacked_memory else "can't be decoded"


def decoded(job: DecodeJob, fd: int, config: MediaConfig) -> Decoded:
    """Decode and process the image in a memfd, and write the pixels in its place."""
    try:
        processed = processors.process(images.decode(os.pread(fd, job.num_bytes, 0), job.limits), config)
    except InvalidImage as error:
        return Decoded(job.number, str(error))
    except MemoryError:
        return Decoded(job.number, "takes too much memory to decode")
    except Exception:  # noqa: BLE001 - a fault of ours: the server's log has it, the client not
        os.write(STDERR, traceback.format_exc().encode())
        return Decoded(job.number, "can't be decoded")
    os.ftruncate(fd, 0)
    written, view = 0, processed.pixels.data.cast("B")
    while written < len(view):
        written += os.pwrite(fd, view[written:], written)
    return Decoded(
        job.number,
        shape=processed.pixels.shape,
        grid=processed.grid,
        text=processed.text,
        run_lengths=processed.run_lengths,
    )


def main(ingest: socket.socket, model_dir: str, num_workers: str, timeout_s: str) -> None:
    """Run the process until ingest ends."""
    config = media.load(Path(model_dir))
    assert config is not None, "a model without media.json has no media process"
    gc.collect()
    gc.freeze()
    with contextlib.suppress(WorkerLostError):
        MediaDecoder(ingest, config, int(num_workers), float(timeout_s)).loop()
