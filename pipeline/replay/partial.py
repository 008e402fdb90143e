"""Rules for recordings that began when the stage already had work.

Some of their messages belong to earlier requests, which a freshly started stage does not know. The rules:

    gateway      leave out answers to requests that were opened earlier
    ingest       leave out only the ends of texts whose tokenization began earlier
    schedule     leave out aborts and closings of earlier requests. Recorded results belong to steps that this scheduler
                 never planned, because rows, blocks and steps are numbered from its start. Each result is replaced by
                 an answer to this scheduler's oldest step in flight. So the load is recorded, but the ids are not.
    execute      leave out rows that were added earlier, blocks appended to them, and steps without any other rows.
                 A row that reads blocks or states which were written earlier reads zeros.
    detokenize   leave out entries of sequences that were opened earlier

Everything that is left out is counted.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from pipeline.replay import format as f
from pipeline.runtime import messages as m

BytesOf = Callable[[Any], bytes]


class Partial(Protocol):
    """The rules of one stage."""

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        """The message that the stage shall receive, or None."""

    def knows(self, event: f.ObservedEvent) -> bool:
        """Whether an event belongs to something that began during the recording."""

    def sent(self, message: Any) -> None:
        """Called when the stage has sent a message."""

    def counts(self) -> dict[str, int]:
        """Number of items left out, by kind."""


def partial_of(header: f.Header) -> Partial:
    return {
        "gateway": GatewayPartial,
        "ingest": IngestPartial,
        "schedule": SchedulePartial,
        "execute": ExecutePartial,
        "detokenize": DetokenizePartial,
    }[header.stage]()


class _Counting:
    def __init__(self) -> None:
        self._left_out: Counter[str] = Counter()

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        return message

    def knows(self, event: f.ObservedEvent) -> bool:
        return True

    def sent(self, message: Any) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return dict(sorted(self._left_out.items()))

    def _kept(self, message: Any, condition: bool, what: str) -> Any | None:
        if condition:
            return message
        self._left_out[what] += 1
        return None


_PER_ENTRY = (
    *("request_ids", "attempts", "indexes", "texts", "text_offsets"),
    *("id_offsets", "num_ids", "finishes", "stop_reasons"),
)
"""The lists of `Deltas` that have a value for each entry."""


Indexed = TypeVar("Indexed", m.FirstTimes, m.DraftCounts)


def _moved(of_entries: list[Indexed], indices: list[int]) -> list[Indexed]:
    """What belongs to the entries that remain, with their new indices."""
    moved = {index: i for i, index in enumerate(indices)}
    return [msgspec.structs.replace(one, index=moved[one.index]) for one in of_entries if one.index in moved]


class GatewayPartial(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._requests: set[int] = set()
        self._opened: set[int] = set()

    def sent(self, message: Any) -> None:
        if isinstance(message, m.Submit):
            self._requests.add(message.request_id)

    def knows(self, event: f.ObservedEvent) -> bool:
        if event.name == "open":
            self._opened.add(event.key)
        if event.name in ("open", "refused", "fail all", "abort"):  # belongs to no request, or to one that begins
            return True
        if event.key not in self._opened:
            self._left_out["events of earlier requests"] += 1
        return event.key in self._opened

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        match message:
            case m.Accepted() | m.Rejected():
                return self._kept(message, message.request_id in self._requests, "answers about earlier requests")
            case m.Deltas():
                return self._deltas(message)
        return message

    def _deltas(self, message: m.Deltas) -> m.Deltas | None:
        indices = [i for i, request_id in enumerate(message.request_ids) if request_id in self._requests]
        self._left_out["answers about earlier requests"] += len(message.request_ids) - len(indices)
        if not indices:
            return None
        ids = np.frombuffer(message.ids, "<i4")
        ends = np.cumsum(message.num_ids)
        parts = [ids[ends[i] - message.num_ids[i] : ends[i]] for i in indices]
        changes: dict[str, Any] = {"ids": np.concatenate(parts).tobytes()}
        for name in _PER_ENTRY:
            values = getattr(message, name)
            changes[name] = [values[i] for i in indices]
        changes["firsts"] = _moved(message.firsts, indices)
        changes["drafts"] = _moved(message.drafts, indices)
        return msgspec.structs.replace(message, **changes)


class IngestPartial(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._requests: set[int] = set()

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        if isinstance(message, m.Submit):
            self._requests.add(message.request_id)
        return message

    def knows(self, event: f.ObservedEvent) -> bool:
        if event.name != "encoded" or event.key in self._requests:
            return True
        self._left_out["earlier texts"] += 1
        return False


class SchedulePartial(_Counting):
    """Answers steps itself, with the step's number as ids."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: set[int] = set()
        self._steps: deque[m.Step] = deque()
        self._generations: dict[int, int] = {}
        self._vocab_size = 1

    def sent(self, message: Any) -> None:
        if isinstance(message, m.Step):
            self._steps.append(message)
            self._generations |= {add.row: add.generation for add in message.adds}

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        match message:
            case m.Start(facts):
                self._vocab_size = facts.vocab_size
            case m.Admit():
                self._requests.add(message.request_id)
            case m.Abort() | m.Closed():
                return self._kept(message, message.request_id in self._requests, "ends of earlier requests")
            case m.StepResult():
                if not self._steps:
                    self._left_out["results without a step in flight"] += 1
                    return None
                self._left_out["replaced results"] += 1
                return self._answer(self._steps.popleft(), bytes_of)
        return message

    def _answer(self, step: m.Step, bytes_of: BytesOf) -> m.StepResult:
        rows = np.frombuffer(bytes_of(step.rows), "<i4")[np.frombuffer(bytes_of(step.samples), "u1") > 0]
        return m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=rows.tobytes(),
            generations=np.array([self._generations[row] for row in rows.tolist()], "<u4").tobytes(),
            ids=np.full(len(rows), step.step_id % self._vocab_size, "<i4").tobytes(),
            finishes=bytes(len(rows)),
            compute_s=0.0,
            wait_s=0.0,
        )


class ExecutePartial(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._rows: set[int] = set()

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        return self._step(message, bytes_of) if isinstance(message, m.Step) else message

    def _step(self, step: m.Step, bytes_of: BytesOf) -> m.Step | None:
        drops = np.frombuffer(bytes_of(step.drops), "<i4")
        known_drops = [row for row in drops.tolist() if row in self._rows]
        self._rows -= set(known_drops)
        self._rows |= {add.row for add in step.adds}
        appended = np.frombuffer(bytes_of(step.block_rows), "<i4")
        is_appended = np.isin(appended, list(self._rows))
        rows = np.frombuffer(bytes_of(step.rows), "<i4")
        is_known = np.isin(rows, list(self._rows))
        self._left_out["earlier rows in steps"] += int((~is_known).sum())
        if not is_known.any() and not step.adds and not known_drops:
            self._left_out["steps with only earlier rows"] += 1
            return None

        spans = np.isin(np.frombuffer(bytes_of(step.span_rows), "<i4"), list(self._rows))
        span_slots = np.repeat(spans, np.frombuffer(bytes_of(step.span_counts), "<i4"))

        def some(array: Any, dtype: str, which: "np.ndarray[Any, Any]") -> bytes:
            data = np.frombuffer(bytes_of(array), dtype)
            return data[which].tobytes() if len(data) else b""  # most steps lack some arrays

        return msgspec.structs.replace(
            step,
            drops=np.array(known_drops, "<i4").tobytes(),
            block_rows=some(step.block_rows, "<i4", is_appended),
            block_ids=some(step.block_ids, "<i4", is_appended),
            rows=some(step.rows, "<i4", is_known),
            starts=some(step.starts, "<i4", is_known),
            counts=some(step.counts, "<i4", is_known),
            samples=some(step.samples, "u1", is_known),
            block_groups=some(step.block_groups, "u1", is_appended),
            drafts=some(step.drafts, "<i4", is_known),
            state_reads=some(step.state_reads, "<i4", is_known),
            state_writes=some(step.state_writes, "<i4", is_known),
            span_rows=some(step.span_rows, "<i4", spans),
            span_starts=some(step.span_starts, "<i4", spans),
            span_counts=some(step.span_counts, "<i4", spans),
            span_slots=some(step.span_slots, "<i4", span_slots),
        )


class DetokenizePartial(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._seqs: set[int] = set()

    def keep(self, message: Any, bytes_of: BytesOf) -> Any | None:
        match message:
            case m.Open():
                self._seqs.add(message.seq)
            case m.Settled():
                return self._settled(message, bytes_of)
        return message

    def _settled(self, message: m.Settled, bytes_of: BytesOf) -> m.Settled | None:
        seqs = np.frombuffer(bytes_of(message.seqs), "<u8")
        is_known = np.array([seq in self._seqs for seq in seqs.tolist()], np.bool_)
        self._left_out["entries of earlier sequences"] += int((~is_known).sum())
        if is_known.all():
            return message
        if not is_known.any():
            return None
        counts = np.frombuffer(bytes_of(message.counts), "<i4")
        ids = np.frombuffer(bytes_of(message.ids), "<i4")
        return m.Settled(
            seqs=seqs[is_known].tobytes(),
            starts=np.frombuffer(bytes_of(message.starts), "<i4")[is_known].tobytes(),
            counts=counts[is_known].tobytes(),
            ids=ids[np.repeat(is_known, counts)].tobytes(),
            finishes=np.frombuffer(bytes_of(message.finishes), "u1")[is_known].tobytes(),
            firsts=_moved(message.firsts, np.flatnonzero(is_known).tolist()),
            drafts=_moved(message.drafts, np.flatnonzero(is_known).tolist()),
            settled_s=message.settled_s,
        )
