"""A tape that reads: a stage that is replayed gets its messages, its clock and its random numbers from a recording.

    recording ──► PlaybackContext ──► ReplayInbox ──► the stage's own code ──► ReplayOutbox ──► capture

The stage sees no socket. The bytes of shared arrays are written where the messages that name them say, into memory of
this process. What it sends is captured in the format of a recording, without times: two replays of one recording write
the same bytes. What goes to the supervisor is not captured: that is about the process that runs, not about its work.
"""

import asyncio
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay.arrays import copies, refs
from pipeline.replay.partial import Partial, partial_of
from pipeline.replay.recorder import FileWriter
from pipeline.runtime import messages as m
from pipeline.runtime.channels import Inbox, MessageDecoder, Outbox
from pipeline.runtime.replay_context import ReplayContext

T = TypeVar("T")

SUPERVISOR = "supervisor.0"
MOMENT_S = 120.0
"""Longest that something beside the loop may take which was done at this place when it was recorded."""


class Divergence(UserError):
    """The stage does not do what the recorded one did."""


class PlaybackContext(ReplayContext):
    """Goes through a recording in step with the stage.

    Of a recording from the stage's start every entry must be met in its order; else the stage is not the one that was
    recorded, and Divergence says where. One that began later is followed loosely: times and random numbers are given
    as far as they are there, and `Partial` leaves out what belongs to requests of before.
    """

    is_replaying = True

    def __init__(self, replay: m.Replay, union: Any) -> None:
        self._reader = f.RecordingReader(replay.path)
        header = self._reader.header
        self._is_strict = header.from_start
        self._partial: Partial | None = None if header.from_start else partial_of(header)
        self._is_paced = replay.paced
        self._entries: Iterator[f.Entry] = iter(self._reader)
        self._head: f.Entry | None = None
        self._decoder: MessageDecoder[Any] = MessageDecoder(union)
        self._acts: dict[str, Callable[[int, bytes], None]] = {}
        self._waiters: dict[tuple[str, int], asyncio.Future[bytes]] = {}
        self._changed: asyncio.Event | None = None
        self._last: dict[str, float] = {"monotonic": 0.0, "time": 0.0}
        self._begun = time.monotonic()
        self._is_over = False
        # Of pages that nobody writes, none is taken: swap space may be large.
        self.memories = {one.name: memoryview(mmap.mmap(-1, one.num_bytes)) for one in header.segments}
        self.num_wakes = self.num_messages = 0
        self._capture = FileWriter(replay.out)
        self._capture.put(f.MAGIC + f.frame(msgspec.structs.replace(header, has_sent=True)))
        self._first: list[f.Wake] = []
        if header.facts is not None:
            start = msgspec.msgpack.encode(m.Start(header.facts))
            self._first.append(f.Wake(0, [SUPERVISOR], [1], [start], [[]]))
        self._advance()

    # ------------------------------------------------------------------------------------------ what the stage asks

    def monotonic(self) -> float:
        return self._value("monotonic")

    def time(self) -> float:
        return self._value("time")

    def randbits(self, num_bits: int) -> int:
        number = self._value("random")
        return int(number)

    def event(self, name: str, key: int = 0, data: bytes = b"") -> None:
        """What `perform` has been given does it; the note of it is passed there."""

    def perform(self, name: str, act: Callable[[int, bytes], None]) -> None:
        self._acts[name] = act

    async def await_external(self, name: str, key: int, data: bytes = b"") -> bytes:
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiters[name, key] = waiter
        self._change()
        try:
            recorded = await waiter
        except asyncio.CancelledError:
            self._waiters.pop((name, key), None)
            if waiter.done() and not waiter.cancelled():
                self._advance()  # it had its turn
            raise
        self._advance()
        return recorded or data

    def observe(self, name: str, key: int, data: bytes) -> bytes:
        while (
            not self._is_strict
            and isinstance(head := self._head, f.ObservedEvent)
            and head.name == name
            and head.key < key
        ):
            self._advance()  # of before the recording, or of what was left out
        match self._head:
            case f.ObservedEvent() as event if (event.name, event.key) == (name, key):
                self._advance()
                return event.data
            case _ if self._is_strict and not self._is_over and self._head is not None:
                raise Divergence(self._where(f"{name} of {key:x} happens, which it did not do here"))
            case _:
                return data

    def catch_up(self) -> None:
        while isinstance(event := self._head, f.ObservedEvent) and event.name in self._acts and not self._first:
            self._acts[event.name](event.key, event.data)
            if self._head is event:  # it is of before the recording, and nothing is there to be done
                self._advance()

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        if self._partial is not None:
            self._partial.sent(message)
        if peer != SUPERVISOR:
            self._capture.put(f.frame(f.Sent(peer, body, copies(message, self.memories))))

    def log_output(self, client: int, data: bytes) -> None:
        self._capture.put(f.frame(f.Sent(f.client(client), data, [])))

    def is_refused(self, peer: str) -> bool:
        """Whether the next send, to `peer`, was refused by a full socket."""
        if isinstance(self._head, f.Refused) and self._head.peer == peer:
            self._advance()
            return True
        return False

    # --------------------------------------------------------------------------------------------------- the inbox

    def next_wake(self) -> list[tuple[str, Any]]:
        """What a blocking stage is given next: (sender, message) pairs; `Stop` where the recording is over."""
        while True:
            match self._look():
                case f.Wake() as wake:
                    if self._is_paced:
                        time.sleep(max(0.0, self._begun + wake.time_ns / 1e9 - time.monotonic()))
                    return self._give(wake)
                case f.ObservedEvent() as event if event.name in self._acts:
                    self.catch_up()
                case f.ObservedEvent() as event:
                    raise Divergence(f"event {event.name} came where the stage waits for messages")
                case None:
                    return self._stop()

    async def next_wake_async(self) -> list[tuple[str, Any]]:
        """The same for an asyncio stage. Events before the wake are done, or waited for, first."""
        while True:
            match self._look():
                case f.Wake() as wake:
                    if self._is_paced:
                        await asyncio.sleep(max(0.0, self._begun + wake.time_ns / 1e9 - time.monotonic()))
                    return self._give(wake)
                case f.ObservedEvent() as event if event.name in self._acts:
                    self._advance()
                    if self._partial is None or self._partial.knows(event):
                        self._acts[event.name](event.key, event.data)
                case f.ObservedEvent() as event:
                    await self._wait_for(event)
                case None:
                    return self._stop()

    async def _wait_for(self, event: f.ObservedEvent) -> None:
        """Let whoever waits for this moment go on, and wait until it has."""
        if self._partial is not None and not self._partial.knows(event):
            self._advance()
            return
        self._changed = asyncio.Event()
        if (waiter := self._waiters.pop((event.name, event.key), None)) is not None:
            waiter.set_result(event.data)
        try:
            async with asyncio.timeout(MOMENT_S):
                await self._changed.wait()
        except TimeoutError:
            raise Divergence(f"{event.name} of {event.key:x} was not done within {MOMENT_S:g} s") from None

    def _look(self) -> "f.Wake | f.ObservedEvent | None":
        """The next thing that makes the stage do something."""
        if self._first:
            return self._first[0]
        while True:
            match self._head:
                case f.Wake() | f.ObservedEvent() | None:
                    return self._head
                case f.Value() | f.Refused() if not self._is_strict:
                    self._advance()
                case f.Value() as value:
                    raise Divergence(self._where(f"the stage did not ask for {value.kind}, as the recorded one did"))
                case f.Refused() as refused:
                    raise Divergence(self._where(f"the stage did not send to {refused.peer}, as the recorded one did"))
                case _:
                    raise AssertionError(self._head)

    def _give(self, wake: f.Wake) -> list[tuple[str, Any]]:
        if self._first:
            self._first.pop(0)
        else:
            self._advance()
        self.num_wakes += 1
        given: list[tuple[str, Any]] = []
        for sender, body, arrays in zip(wake.senders, wake.bodies, wake.arrays, strict=True):
            try:
                message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise UserError(self._where(f"a recorded message is none of this version's: {error}")) from error
            self._fill(message, arrays)
            kept = message if self._partial is None else self._partial.keep(message, self._bytes_of)
            if kept is not None:
                given.append((sender, kept))
        self.num_messages += len(given)
        return given

    def _fill(self, message: Any, arrays: list[bytes]) -> None:
        """Put the bytes of a message's arrays where it says that they are."""
        for ref, data in zip(refs(message), arrays, strict=True):
            memory = self.memories.get(ref.segment)
            if memory is None or ref.offset < 0 or len(data) != ref.length or ref.offset + ref.length > len(memory):
                raise UserError(self._where(f"{ref} is not in a segment of the recording"))
            memory[ref.offset : ref.offset + ref.length] = data

    def _bytes_of(self, array: Any) -> bytes:
        if isinstance(array, bytes):
            return array
        return bytes(self.memories[array.segment][array.offset : array.offset + array.length])

    def _stop(self) -> list[tuple[str, Any]]:
        """The recording is over: so is the stage."""
        self._is_over = True
        return [(SUPERVISOR, m.Stop())]

    # ------------------------------------------------------------------------------------------------------- inside

    def _value(self, kind: str) -> float | int:
        match self._head:
            case f.Value() as value if value.kind == kind:
                self._advance()
                self._last[kind] = value.number
                return value.number
            case _ if self._is_strict and not self._is_over and self._head is not None:
                raise Divergence(self._where(f"the stage asks for {kind}, which the recorded one did not do here"))
            case _:
                return self._last.get(kind, 1)

    def _advance(self) -> None:
        self._head = next((entry for entry in self._entries if not isinstance(entry, f.Sent)), None)
        self._change()

    def _change(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _where(self, what: str) -> str:
        return f"{self._reader.path}, after wake {self.num_wakes}: {what}"

    def close(self) -> int:
        self._reader.__exit__()
        counts = self._partial.counts() if self._partial is not None else {}
        counts |= {"wakes": self.num_wakes, "messages": self.num_messages}
        self._capture.put(
            f.frame(f.End("the recording was over" if self._is_over else "the stage was told to stop", counts))
        )
        self._capture.put_end()
        self._capture.wait()
        return self._capture.num_bytes


class ReplayInbox(Inbox[T]):
    """An inbox that a tape fills."""

    is_replayed = True

    def __init__(self, replay_context: PlaybackContext) -> None:
        self._replay = replay_context
        self._left: list[tuple[str, Any]] = []
        self.num_received = 0
        self.num_stale = 0
        self.last_sender = ""

    def wait(self, timeout_s: float) -> bool:
        return True

    def has_message(self) -> bool:
        return True

    def take(self) -> T | None:
        while not self._left:
            self._left = self._replay.next_wake()
        sender, message = self._left.pop(0)
        return self._took(sender, message)

    def took(self) -> None:
        """The tape knows."""

    def receive_all(self) -> list[T]:
        left, self._left = self._left, []
        return [self._took(*one) for one in left or self._replay.next_wake()]

    async def replayed(self) -> list[T]:
        return [self._took(*one) for one in await self._replay.next_wake_async()]

    def _took(self, sender: str, message: T) -> T:
        self.num_received += 1
        self.last_sender = sender
        return message

    def close(self) -> None:
        pass


class ReplayOutbox(Outbox[T], Generic[T]):
    """An outbox that a tape captures."""

    def __init__(self, replay_context: PlaybackContext, peer: str) -> None:
        self._replay = replay_context
        self.peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self.num_sent = 0
        self.num_refused = 0

    def send(self, message: T) -> bool:
        if self._replay.is_refused(self.peer):
            self.num_refused += 1
            return False
        self._replay.sent(self.peer, self._encoder.encode(message), message)
        self.num_sent += 1
        return True

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass
