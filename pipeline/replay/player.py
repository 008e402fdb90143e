"""The replay context that plays a recording: a replayed stage gets its messages, clock and random numbers from it.

    recording ──► PlaybackContext ──► ReplayInbox ──► the stage's own code ──► ReplayOutbox ──► capture

The stage uses no sockets (replay_channels.py). The bytes of shared arrays are written to the places that their messages
name, in memory of this process. What the stage sends is captured in the format of a recording, without times, so two
replays of one recording write the same bytes. Messages to the supervisor are not captured, because they are about the
running process.
"""

import asyncio
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay.arrays import copies, refs
from pipeline.replay.partial import Partial, partial_of
from pipeline.replay.recorder import FileWriter
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.runtime.transport.memories import Memories

MOMENT_S = 120.0
"""Longest wait for work beside the loop that had ended here in the recording."""


class Divergence(UserError):
    """The stage deviates from the recorded one."""


class PlaybackContext(ReplayContext):
    """Plays a recording, in step with the stage.

    If the recording began with the stage, every entry must occur in order, else `Divergence` says where they differ. A
    recording that began later is followed loosely: times and random numbers are returned as far as they are recorded,
    and `Partial` leaves out what belongs to earlier requests.
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
        self.memories = Memories()
        for one in header.segments:  # pages that are never written take no memory, so large swap space is fine
            self.memories.add(one.name, memoryview(mmap.mmap(-1, one.num_bytes)))
        self.num_turns = self.num_messages = 0
        self._capture = FileWriter(replay.out)
        self._capture.put(f.MAGIC + f.frame(msgspec.structs.replace(header, has_sent=True)))
        self._first: list[f.LoopTurn] = []
        if header.facts is not None:
            start = msgspec.msgpack.encode(m.Start(header.facts))
            self._first.append(f.LoopTurn(0, [SUPERVISOR], [1], [start], [[]]))
        self._advance()

    def add_segment(self, name: str, num_bytes: int) -> None:
        """A process has joined the recorded server, and the stage reads its segment."""
        self.memories.add(name, memoryview(mmap.mmap(-1, num_bytes)))

    # --------------------------------------------------------------------------------------- the stage's replay context

    def monotonic(self) -> float:
        return self._value("monotonic")

    def time(self) -> float:
        return self._value("time")

    def randbits(self, num_bits: int) -> int:
        number = self._value("random")
        return int(number)

    def event(self, name: str, key: int = 0, data: bytes = b"") -> None:
        """Does nothing: the function given to `perform` handles the event when it is reached."""

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
                self._advance()  # its event has passed
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
            self._advance()  # began before the recording, or was left out
        match self._head:
            case f.ObservedEvent() as event if (event.name, event.key) == (name, key):
                self._advance()
                return event.data
            case _ if self._is_strict and not self._is_over and self._head is not None:
                raise Divergence(self._where(f"{name} of {key:x} happens here, but not in the recording"))
            case _:
                return data

    def catch_up(self) -> None:
        while isinstance(event := self._head, f.ObservedEvent) and event.name in self._acts and not self._first:
            self._acts[event.name](event.key, event.data)
            if self._head is event:  # began before the recording; there is nothing to do
                self._advance()

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        if self._partial is not None:
            self._partial.sent(message)
        if peer != SUPERVISOR:
            self._capture.put(f.frame(f.Sent(peer, body, copies(message, self.memories))))

    def log_output(self, client: int, data: bytes) -> None:
        self._capture.put(f.frame(f.Sent(f.client(client), data, [])))

    def is_refused(self, peer: str) -> bool:
        """Whether a full socket refused the next send to `peer`."""
        if isinstance(self._head, f.SendRefused) and self._head.peer == peer:
            self._advance()
            return True
        return False

    # --------------------------------------------------------------------------------------------------- the inbox

    def next_turn(self) -> list[tuple[str, Any]]:
        """The next turn of a blocking stage: (sender, message) pairs; `Stop` at the end of the recording."""
        while True:
            match self._look():
                case f.LoopTurn() as turn:
                    if self._is_paced:
                        time.sleep(max(0.0, self._begun + turn.time_ns / 1e9 - time.monotonic()))
                    return self._give(turn)
                case f.ObservedEvent() as event if event.name in self._acts:
                    self.catch_up()
                case f.ObservedEvent() as event:
                    raise Divergence(f"event {event.name} is recorded here, but the stage waits for messages")
                case None:
                    return self._stop()

    async def next_turn_async(self) -> list[tuple[str, Any]]:
        """The next turn of an asyncio stage. Events before it are performed or awaited first."""
        while True:
            match self._look():
                case f.LoopTurn() as turn:
                    if self._is_paced:
                        await asyncio.sleep(max(0.0, self._begun + turn.time_ns / 1e9 - time.monotonic()))
                    return self._give(turn)
                case f.ObservedEvent() as event if event.name in self._acts:
                    self._advance()
                    if self._partial is None or self._partial.knows(event):
                        self._acts[event.name](event.key, event.data)
                case f.ObservedEvent() as event:
                    await self._wait_for(event)
                case None:
                    return self._stop()

    async def _wait_for(self, event: f.ObservedEvent) -> None:
        """Release the task that awaits this event, and wait until it has run."""
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

    def _look(self) -> "f.LoopTurn | f.ObservedEvent | None":
        """The next entry that makes the stage do something."""
        if self._first:
            return self._first[0]
        while True:
            match self._head:
                case f.LoopTurn() | f.ObservedEvent() | None:
                    return self._head
                case f.Value() | f.SendRefused() if not self._is_strict:
                    self._advance()
                case f.Value() as value:
                    raise Divergence(self._where(f"the recorded stage read {value.kind} here, this one did not"))
                case f.SendRefused() as refused:
                    raise Divergence(self._where(f"the recorded stage sent to {refused.peer} here, this one did not"))
                case _:
                    raise AssertionError(self._head)

    def _give(self, turn: f.LoopTurn) -> list[tuple[str, Any]]:
        if self._first:
            self._first.pop(0)
        else:
            self._advance()
        self.num_turns += 1
        given: list[tuple[str, Any]] = []
        for sender, body, arrays in zip(turn.senders, turn.bodies, turn.arrays, strict=True):
            try:
                message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise UserError(self._where(f"a recorded message is not valid in this version: {error}")) from error
            self._fill(message, arrays)
            kept = message if self._partial is None else self._partial.keep(message, self._bytes_of)
            if kept is not None:
                given.append((sender, kept))
        self.num_messages += len(given)
        return given

    def _fill(self, message: Any, arrays: list[bytes]) -> None:
        """Copy the recorded bytes of a message's arrays to their places."""
        for ref, data in zip(refs(message), arrays, strict=True):
            memory = self.memories.get(ref.segment)
            if memory is None or ref.offset < 0 or len(data) != ref.length or ref.offset + ref.length > len(memory):
                raise UserError(self._where(f"{ref} is not in a segment of the recording"))
            memory[ref.offset : ref.offset + ref.length] = data

    def _bytes_of(self, array: Any) -> bytes:
        if isinstance(array, bytes):
            return array
        return bytes(self.memories.data_of(array))

    def _stop(self) -> list[tuple[str, Any]]:
        """The end of the recording: stop the stage."""
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
                raise Divergence(self._where(f"the stage reads {kind} here, the recorded one did not"))
            case _:
                return self._last.get(kind, 1)

    def _advance(self) -> None:
        self._head = next((entry for entry in self._entries if not isinstance(entry, f.Sent)), None)
        self._change()

    def _change(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def _where(self, what: str) -> str:
        return f"{self._reader.path}, after wake {self.num_turns}: {what}"

    def close(self) -> int:
        self._reader.__exit__()
        counts = self._partial.counts() if self._partial is not None else {}
        counts |= {"turns": self.num_turns, "messages": self.num_messages}
        self._capture.put(f.frame(f.End("end of the recording" if self._is_over else "the stage was stopped", counts)))
        self._capture.put_end()
        self._capture.wait()
        return self._capture.num_bytes
