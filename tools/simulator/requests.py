"""Requests as the simulation uses them: from a trace, or synthetic."""

from collections.abc import Iterable, Sequence

import msgspec

from pipeline.replay.traffic import TrafficRecord


class SimRequest(msgspec.Struct, eq=False):
    """One prompt, and the lengths of its outputs."""

    index: int
    arrival_s: float
    num_prompt: int
    outputs: tuple[int, ...]
    """Output tokens of each of its sequences, at least 1."""
    keys: tuple[int, ...]
    """Of the whole blocks of the prompt."""
    output_keys: tuple[int, ...] = ()
    """Of the blocks after these, which end in the output of the first sequence."""
    priority: int = 0
    session: int | None = None

    @property
    def num_output(self) -> int:
        """Tokens of all outputs."""
        return sum(self.outputs)


class Trace(msgspec.Struct):
    """Requests by arrival."""

    name: str
    block_tokens: int
    requests: list[SimRequest]

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(one.num_prompt + max(one.outputs) for one in self.requests)


def trace_of(records: Sequence[TrafficRecord], name: str, speed: float = 1.0) -> Trace:
    """A trace of `records`, which are by time and not empty, with `speed` times as many requests in a second."""
    begin_ms, size = records[0].timestamp, records[0].block_size
    requests = []
    for index, one in enumerate(records):
        num_whole = one.input_length // size
        has_keys = len(one.hash_ids) >= num_whole
        requests.append(
            SimRequest(
                index,
                (one.timestamp - begin_ms) / 1000 / speed,
                one.input_length,
                tuple(max(1, length) for length in one.output_lengths) or (max(1, one.output_length),),
                tuple(one.hash_ids[:num_whole]),
                tuple(one.output_hash_ids) if has_keys else (),
                one.priority,
                one.session,
            )
        )
    return Trace(name, size, requests)


def records_of(trace: Trace) -> Iterable[TrafficRecord]:
    """The lines of a trace."""
    for one in trace.requests:
        yield TrafficRecord(
            round(one.arrival_s * 1000, 3),
            one.num_prompt,
            max(one.outputs),
            list(one.keys),
            trace.block_tokens,
            list(one.output_keys),
            list(one.outputs) if len(one.outputs) > 1 else [],
            one.priority,
            one.session,
        )
