"""The load of each stage, and the counting of its output.

Every load is a closed loop over `num_streams` streams. A stream is a request that gets its tokens one after the other,
followed by another request. `turn` sends the stage all input that is due, and receives its output.

    ingest       Submit            → Accepted, Admit       each stream waits for both
    schedule     Admit, StepResult → Open, Step, Settled   each step is answered immediately
    detokenize   Open, Settled     → Deltas                `AHEAD` steps are in flight
    gateway      HTTP, Accepted, Deltas → Submit, SSE, Closed   the same
"""

import time
from collections import deque
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from pipeline.cli.profile.alone.harness import Harness
from pipeline.cli.profile.alone.http import Sink
from pipeline.runtime import messages as m

AHEAD = 3
"""Steps in flight, so that the stage never waits for the load."""
NUM_OUTPUT = 128
"""Tokens of each prompt."""
NUM_PROMPT = 128
TEXT = " wo~rd"
"""The mark of a token in what clients read."""
MARK = b"~"
"""Appears once for each token in what clients read, so clients count tokens by it."""
WORDS = "the sea was calm and the little boat went out with the tide past the old harbour wall "
FIRST_ID = 1000
"""Ids from here on are words in most vocabularies; none of them ends a sequence."""
NUM_IDS = 8000


class StageDriver(Protocol):
    """Counters since the driver's start."""

    num_tokens: int
    """Prompt tokens for ingest, output tokens for the others."""
    latencies_s: list[float]
    """From a message to the last message that results from it."""

    def turn(self) -> None: ...

    def close(self) -> None: ...


def load_of(harness: Harness, num_streams: int, model: str) -> StageDriver:
    """`model` is the model name that clients send."""
    match harness.stage:
        case "ingest":
            return IngestDriver(harness, num_streams)
        case "schedule":
            return ScheduleDriver(harness, num_streams)
        case "detokenize":
            return DetokenizeDriver(harness, num_streams)
        case "gateway":
            return GatewayDriver(harness, num_streams, model)
    raise KeyError(harness.stage)


def ids_of(stream: int, position: int, num: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Output ids; no two streams have the same."""
    return (FIRST_ID + (stream * 131 + np.arange(position, position + num) * 17) % NUM_IDS).astype(np.int32)


class _NothingToClose:
    def close(self) -> None:
        pass


class IngestDriver(_NothingToClose):
    """Chats of about `NUM_PROMPT` tokens, all different."""

    def __init__(self, harness: Harness, num_streams: int) -> None:
        self._harness = harness
        self._next = 1
        self._sent: dict[int, float] = {}
        self._answers: dict[int, int] = {}
        self._num_streams = num_streams
        self._text = WORDS * (NUM_PROMPT // len(WORDS.split()))
        self.num_tokens = 0
        self.latencies_s: list[float] = []

    def turn(self) -> None:
        harness = self._harness
        while len(self._sent) < self._num_streams:
            self._submit()
        if not harness.wait(0.2):
            harness.check()
        for message in harness.received():
            match message:
                case m.Accepted():
                    self._answered(message.request_id)
                    harness.release(message.prompt_ids, "gateway.0")
                case m.Admit():
                    self.num_tokens += len(harness.bytes_of(message.prompt_ids)) // 4
                    self._answered(message.request_id)
                    harness.release(message.prompt_ids, "schedule.0")
                case m.Rejected():
                    raise AssertionError(message.failure)
                case _:
                    raise AssertionError(message)

    def _submit(self) -> None:
        number, self._next = self._next, self._next + 1
        prompt = m.ChatPrompt([m.ChatMessage("user", f"{number} {self._text}")])
        options = m.GenerationOptions(max_tokens=NUM_OUTPUT, seed=number)
        message = m.Submit(number, 1, 0, time.time(), prompt, options)
        self._sent[number] = time.monotonic()
        self._harness.send(message, "gateway.0")

    def _answered(self, number: int) -> None:
        self._answers[number] = self._answers.get(number, 0) + 1
        if self._answers[number] == 2:
            del self._answers[number]
            self.latencies_s.append(time.monotonic() - self._sent.pop(number))


class ScheduleDriver(_NothingToClose):
    """Requests whose prompts share nothing, and an instant executor."""

    def __init__(self, harness: Harness, num_streams: int) -> None:
        self._harness = harness
        self._num_streams = num_streams
        self._num_open = 0
        self._next = 1
        self._generations = np.zeros(harness.settings.schedule.max_num_seqs, np.uint32)
        self._of_seq: dict[int, int] = {}
        self._options = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions(max_tokens=NUM_OUTPUT)))
        self._answered_at = 0.0
        self.num_tokens = 0
        self.latencies_s: list[float] = []

    def turn(self) -> None:
        harness = self._harness
        while self._num_open < self._num_streams:
            self._admit()
        if not harness.wait(0.2):
            harness.check()
        for message in harness.received():
            match message:
                case m.Step():
                    self._step(message)
                case m.Open():
                    self._of_seq[message.seq] = message.request_id
                case m.Settled():
                    self._settled(message)
                case m.Release():
                    harness.released(message, "ingest.0")
                case _:
                    raise AssertionError(message)

    def _admit(self) -> None:
        number, self._next = self._next, self._next + 1
        prompt = ids_of(number, 0, NUM_PROMPT) + number % 1000
        ids = self._harness.arena("ingest.0").put(prompt.tobytes(), readers=("schedule.0",))
        message = m.Admit(number, 1, 0, float(number), ids, self._options)
        self._harness.send(message, "ingest.0")
        self._num_open += 1

    def _step(self, step: m.Step) -> None:
        """Answer the step immediately."""
        if self._answered_at:
            self.latencies_s.append(time.monotonic() - self._answered_at)
        read = self._harness.bytes_of
        for add in step.adds:
            self._generations[add.row] = add.generation
        rows = np.frombuffer(read(step.rows), np.int32)[np.frombuffer(read(step.samples), np.uint8) > 0]
        result = m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=rows.tobytes(),
            generations=self._generations[rows].tobytes(),
            ids=np.full(len(rows), FIRST_ID + step.step_id % NUM_IDS, np.int32).tobytes(),
            finishes=bytes(len(rows)),
            compute_s=0.0,
            wait_s=0.0,
        )
        self._answered_at = time.monotonic()
        self._harness.send(result, "execute.0")
        self.num_tokens += len(rows)
        arrays = (step.drops, step.block_rows, step.block_ids, step.rows, step.starts, step.counts, step.samples)
        copies = (step.copy_sources, step.copy_targets)
        for array in (*arrays, *copies, *(part for add in step.adds for part in (add.ids, add.blocks))):
            self._harness.release(array, "execute.0")

    def _settled(self, settled: m.Settled) -> None:
        read = self._harness.bytes_of
        finishes = np.frombuffer(read(settled.finishes), np.uint8)
        if finishes.any():
            for seq in np.frombuffer(read(settled.seqs), np.uint64)[finishes > 0].tolist():
                self._harness.send(m.Closed(self._of_seq.pop(seq), 1), "gateway.0")
                self._num_open -= 1
        for array in (settled.seqs, settled.starts, settled.counts, settled.ids, settled.finishes):
            self._harness.release(array, "detokenize.0")


class _Steps:
    """Steps in flight. A step is complete when all its tokens have come out."""

    def __init__(self, load: StageDriver) -> None:
        self._load = load
        self._waiting: deque[tuple[int, float]] = deque()
        self._num_sent = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def sent(self, num_tokens: int) -> None:
        self._num_sent += num_tokens
        self._waiting.append((self._num_sent, time.monotonic()))

    def came(self, num_tokens: int) -> None:
        """This many tokens have come out since the start."""
        assert num_tokens <= self._num_sent, "more came out than went in"
        while self._waiting and self._waiting[0][0] <= num_tokens:
            self._load.latencies_s.append(time.monotonic() - self._waiting.popleft()[1])


class DetokenizeDriver(_NothingToClose):
    """Every step settles one id of each stream."""

    def __init__(self, harness: Harness, num_streams: int) -> None:
        self._harness = harness
        self._steps = _Steps(self)
        self._seqs = np.arange(1, num_streams + 1, dtype=np.uint64)
        self._positions = (np.arange(num_streams) * NUM_OUTPUT // num_streams).astype(np.int32)
        """Staggered, so that the streams don't all end in one step."""
        self._starts = self._positions.copy()
        self._counts = np.ones(num_streams, np.int32)
        self._next_seq = num_streams + 1
        self._options = msgspec.Raw(msgspec.msgpack.encode(m.GenerationOptions()))
        self.num_tokens = 0
        self.latencies_s: list[float] = []
        for seq in self._seqs.tolist():
            self._open(seq)
        self._starts[:] = 0

    def _open(self, seq: int) -> None:
        tail = ids_of(seq, 0, 8).tobytes()
        self._harness.send(m.Open(seq, seq, 1, 0, 0, tail, self._options), "schedule.0")

    def turn(self) -> None:
        harness = self._harness
        while len(self._steps) < AHEAD:
            self._settle()
        if not harness.wait(0.2):
            harness.check()
        for message in harness.received():
            match message:
                case m.Deltas():
                    self.num_tokens += sum(message.num_ids)
                case m.Release():
                    harness.released(message, "schedule.0")
                case _:
                    raise AssertionError(message)
        self._steps.came(self.num_tokens)

    def _settle(self) -> None:
        put = partial(self._harness.arena("schedule.0").put, readers=("detokenize.0",))
        ids = (FIRST_ID + (self._seqs.astype(np.int64) * 131 + self._starts * 17) % NUM_IDS).astype(np.int32)
        self._positions += 1
        is_last = self._positions >= NUM_OUTPUT
        message = m.Settled(
            seqs=put(self._seqs.tobytes()),
            starts=put(self._starts.tobytes()),
            counts=put(self._counts.tobytes()),
            ids=put(ids.tobytes()),
            finishes=put((is_last * np.uint8(m.Finish.LENGTH)).tobytes()),
        )
        self._harness.send(message, "schedule.0")
        self._steps.sent(len(self._seqs))
        self._starts += 1
        for index in np.flatnonzero(is_last).tolist():
            self._seqs[index] = self._next_seq
            self._positions[index] = self._starts[index] = 0
            self._open(self._next_seq)
            self._next_seq += 1


class GatewayDriver:
    """Streaming HTTP clients that discard what they read, and an instant chain behind the gateway."""

    def __init__(self, harness: Harness, num_streams: int, model: str) -> None:
        self._harness = harness
        self._steps = _Steps(self)
        self._sink = Sink(harness.address, model, num_streams, NUM_OUTPUT, mark=MARK, poller=harness.poller)
        self._request_ids: list[int] = []
        self._positions: list[int] = []
        """Tokens that each open stream has received; below, the number it will receive."""
        self._lefts: list[int] = []
        self._num_streams = num_streams
        self._num_begun = 0
        self.num_tokens = 0
        self.latencies_s: list[float] = []

    def turn(self) -> None:
        harness = self._harness
        self._sink.open_calls()
        while self._request_ids and len(self._steps) < AHEAD:
            self._delta()
        if not harness.wait(0.2):
            harness.check()
        for message in harness.received():
            match message:
                case m.Submit():
                    self._begin(message)
                case m.Closed():
                    pass
                case m.Release():
                    harness.released(message, "ingest.0")
                case _:
                    raise AssertionError(message)
        self._sink.read()
        self.num_tokens = self._sink.num_tokens
        self._steps.came(self.num_tokens)

    def close(self) -> None:
        self._sink.close()

    def _begin(self, submit: m.Submit) -> None:
        ids = ids_of(self._num_begun, 0, NUM_PROMPT).tobytes()
        self._harness.send(m.Accepted(submit.request_id, 1, ids), "ingest.0")
        self._request_ids.append(submit.request_id)
        # staggered, so that the streams don't all end in one step
        first = self._num_begun * NUM_OUTPUT // self._num_streams if self._num_begun < self._num_streams else 0
        self._positions.append(0)
        self._lefts.append(NUM_OUTPUT - first)
        self._num_begun += 1

    def _delta(self) -> None:
        """A step: one token of each stream."""
        num, size = len(self._request_ids), len(TEXT)
        self._lefts = [left - 1 for left in self._lefts]
        message = m.Deltas(
            request_ids=self._request_ids,
            attempts=[1] * num,
            indexes=[0] * num,
            texts=[TEXT] * num,
            text_offsets=[index * size for index in self._positions],
            ids=(FIRST_ID + np.array(self._positions, np.int32)).tobytes(),
            id_offsets=self._positions,
            num_ids=[1] * num,
            finishes=[0 if left else int(m.Finish.LENGTH) for left in self._lefts],
            stop_reasons=[None] * num,
        )
        self._harness.send(message, "detokenize.0")
        self._steps.sent(num)
        alive = [i for i, left in enumerate(self._lefts) if left]
        self._request_ids = [self._request_ids[i] for i in alive]
        self._positions = [self._positions[i] + 1 for i in alive]
        self._lefts = [self._lefts[i] for i in alive]
