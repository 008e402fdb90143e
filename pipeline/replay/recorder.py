"""Records a stage. The stage's loop encodes the entries and a thread writes them, so that a slow disk does not delay
the stage.

The file can be read even if the process is killed: see format.py. If the disk can't keep up, the recording ends with
that reason.
"""

import logging
import os
import threading
import time
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay.arrays import copies
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.files.private_files import create_private
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.generation_config import ExcludedTokens, GenerationDefaults
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.transport.memories import Memories
from pipeline.version import VERSION

MAX_PENDING_BYTES = 64 * 1024**2
"""Bytes that may wait to be written."""
CLOSE_S = 5.0
"""Longest time that an ending stage waits for its recording to be written."""


class RecordState(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a recording."""

    num_bytes: int
    num_pending_bytes: int
    """Part of `num_bytes` that is not written yet."""
    ended: str = ""
    """Why the recording ended; empty while it continues."""
    is_closed: bool = False
    """The file is closed."""
    failure: str = ""
    """Why the file is incomplete."""


class FileWriter:
    """Writes frames in a thread of its own. Raises OSError if the file can't be opened."""

    def __init__(self, path: str) -> None:
        self._fd = create_private(path)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self.num_bytes = 0
        """Bytes passed to `put`."""
        self._num_written = 0
        self.failure = ""
        """Why writing failed; nothing more is written."""
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()

    @property
    def num_pending_bytes(self) -> int:
        return self.num_bytes - self._num_written

    def put(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._queue.put(data)

    def put_end(self) -> None:
        """Close the file once everything is written. Nothing may be put after it."""
        self._queue.put(None)

    def wait(self) -> bool:
        """After `put_end`: wait up to `CLOSE_S` until everything is written. Returns whether it was."""
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive() and not self.failure

    def _run(self) -> None:
        try:
            while (data := self._queue.get()) is not None:
                self._write(data)
        finally:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.failure:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self.failure = error.strerror or str(error)
        self._num_written += len(data)


class Writer(Protocol):
    """Where a recording is written; see `FileWriter`."""

    num_bytes: int
    failure: str

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_pending_bytes(self) -> int: ...

    def put(self, data: bytes) -> None: ...

    def put_end(self) -> None: ...

    def wait(self) -> bool: ...


class RecordingContext(ReplayContext):
    """Records what the stage receives and reads, until a limit is reached or the stage ends. All methods are called
    from one thread.

    A recording that begins while the stage runs begins with its next complete wake: what the stage still does for
    earlier messages is not recorded.
    """

    is_recording = True

    def __init__(
        self,
        order: m.Record,
        header: f.Header,
        memories: Memories,
        log: logging.Logger,
        writer: Writer | None = None,
    ) -> None:
        """Without a `writer`, a thread writes the file that the order names. Raises OSError if it can't be opened."""
        self.path = order.path
        """Empty for the recording of a crash."""
        self._writer = writer or FileWriter(order.path)
        self._memories = memories
        self._log = log
        self._max_bytes = order.max_bytes
        self._has_sent = header.has_sent
        self._begun_ns = time.monotonic_ns()
        self._end_ns = self._begun_ns + round(order.max_s * 1e9)
        self._num_to_skip = 0 if header.from_start else 2
        """Wakes still to skip, with everything that the stage does in them: the rest of the current wake, and the work
        that follows it."""
        self.is_over = False
        self._ended = ""
        self._lease_s = order.lease_s or float("inf")
        self._kept_s = time.monotonic()
        self._turn: tuple[list[str], list[int], list[bytes], list[list[bytes]]] = ([], [], [], [])
        self._writer.put(f.MAGIC + f.frame(header))
        if self.path:
            log.info("recording", extra={"fields": {"file": self.path}})

    def monotonic(self) -> float:
        return self._noted("monotonic", time.monotonic())

    def time(self) -> float:
        return self._noted("time", time.time())

    def randbits(self, num_bits: int) -> int:
        number = super().randbits(num_bits)
        self._put(f.Value("random", number))
        return number

    def event(self, name: str, key: int = 0, data: bytes = b"") -> None:
        self._put(f.ObservedEvent(name, key, data))

    async def await_external(self, name: str, key: int, data: bytes = b"") -> bytes:
        self._put(f.ObservedEvent(name, key, data))
        return data

    def observe(self, name: str, key: int, data: bytes) -> bytes:
        self._put(f.ObservedEvent(name, key, data))
        return data

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        if not self.is_over:
            senders, incarnations, bodies, arrays = self._turn
            senders.append(sender)
            incarnations.append(incarnation)
            bodies.append(body)
            arrays.append(copies(message, self._memories))

    def end_turn(self) -> None:
        if self.is_over:
            return
        now_ns = time.monotonic_ns()
        if now_ns > self._end_ns:
            self.finish("it reached its time limit")
            return
        if self.ends_alone():
            return
        turn, self._turn = self._turn, ([], [], [], [])
        self._num_to_skip = max(0, self._num_to_skip - 1)
        self._put(f.LoopTurn(now_ns - self._begun_ns, *turn))

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        if self._has_sent and not self.is_over and not self._num_to_skip:
            self._put(f.Sent(peer, body, copies(message, self._memories)))

    def log_output(self, client: int, data: bytes) -> None:
        if self._has_sent:
            self._put(f.Sent(f.client(client), data, []))

    def refused(self, peer: str) -> None:
        self._put(f.SendRefused(peer))

    def _noted(self, kind: str, number: float) -> float:
        self._put(f.Value(kind, number))
        return number

    def _put(self, entry: f.Entry) -> None:
        if self.is_over or self._num_to_skip:
            return
        data = f.frame(entry)
        if self._writer.num_bytes + len(data) > self._max_bytes:
            self.finish("it reached its size limit")
        elif self._writer.num_pending_bytes > MAX_PENDING_BYTES:
            self.finish("the disk was too slow")
        elif self._writer.failure:
            self.finish(f"it could not be written: {self._writer.failure}")
        else:
            self._writer.put(data)

    @property
    def state(self) -> RecordState:
        writer = self._writer
        return RecordState(
            writer.num_bytes, writer.num_pending_bytes, self._ended, self.is_over and writer.is_closed, writer.failure
        )

    def keep(self) -> None:
        """Renew the lease."""
        self._kept_s = time.monotonic()

    def ends_alone(self) -> bool:
        """Whether the recording has ended. Ends it if the lease has run out."""
        if not self.is_over and time.monotonic() - self._kept_s > self._lease_s:
            self.finish(f"its command was not heard from for {self._lease_s:g} s")
        return self.is_over

    def finish(self, reason: str) -> None:
        """End the recording for this reason."""
        if self.is_over:
            return
        self.is_over = True
        self._ended = reason
        self._writer.put(f.frame(f.End(reason)))
        self._writer.put_end()
        if self.path:
            fields = {"file": self.path, "why": reason, "bytes": self._writer.num_bytes}
            level = logging.ERROR if self._writer.failure else logging.INFO
            self._log.log(level, "recorded", extra={"fields": fields})

    def close(self, reason: str = "the stage ended") -> int:
        """Write what is left. Returns the size of the file in bytes."""
        self.finish(reason)
        if not self._writer.wait():
            why = self._writer.failure or f"it took more than {CLOSE_S:g} s to write"
            self._log.error("the recording is incomplete: %s", why)
        return self._writer.num_bytes


def header_of(launch: m.Launch, order: m.Record, *, from_start: bool) -> f.Header:
    """The header of a stage's recording."""
    generation, excluded = _generation(launch)
    return f.Header(
        format=f.FORMAT,
        version=VERSION,
        stage=launch.stage,
        replica=launch.replica,
        rank=launch.rank,
        incarnation=launch.incarnation,
        from_start=from_start,
        has_sent=order.with_sent,
        settings=msgspec.Raw(msgspec.msgpack.encode(launch.settings)),
        model_dir=launch.model_dir,
        peers=[peer.name for peer in launch.peers],
        segments=[f.SegmentSize(one.name, one.num_bytes, one.writable) for one in launch.segments],
        facts=order.facts,
        instant=launch.entry == topology.INSTANT,
        generation=generation,
        launch_facts=launch.facts,
        incarnations=launch.incarnations,
        excluded=excluded,
        crash_counts=launch.crash_counts,
    )


def _generation(launch: m.Launch) -> tuple[GenerationDefaults | None, ExcludedTokens]:
    """The sampling parameters in the folder that the settings name; None if they name none, or it is gone by now."""
    if not generation_config.names_folder(launch.settings):
        return None, ExcludedTokens()
    source = launch.settings, launch.model_dir
    try:
        return generation_config.load(*source), generation_config.excluded(*source)
    except UserError:
        return None, ExcludedTokens()
