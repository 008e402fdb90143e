"""Compares two recordings of what a stage sent, message by message and byte by byte."""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import msgspec

from pipeline.replay import format as f

SHOWN_CHARS, SHOWN_BEFORE = 200, 60


class ReplayComparison(msgspec.Struct, frozen=True):
    num_same: int
    """Number of equal messages before the first difference."""
    difference: str
    """The first difference; empty if there is none."""
    sent: dict[str, int]
    """Number of messages of the first file, by peer."""
    num_bytes: int
    """Bytes of the first file's messages and arrays."""
    flaw: str
    """Why the second file is incomplete. Messages of the first file beyond its end are then not a difference."""

    @property
    def are_same(self) -> bool:
        return not self.difference


def compare(path: Path, expected: Path | None) -> ReplayComparison:
    """Compare the sent messages of two recordings or captures; without a second one, count them. Raises UserError."""
    counts: Counter[str] = Counter()
    num_bytes = num_same = 0
    difference = ""
    with f.RecordingReader(path) as found:
        if expected is None:
            for one in _sent(found):
                counts[_kind(one)] += 1
                num_bytes += len(one.body) + sum(map(len, one.arrays))
            return ReplayComparison(0, "", dict(counts), num_bytes, "")
        with f.RecordingReader(expected) as reader:
            for ours, theirs in zip_longest(_sent(found), _sent(reader)):
                if ours is not None:
                    counts[_kind(ours)] += 1
                    num_bytes += len(ours.body) + sum(map(len, ours.arrays))
                if difference or (theirs is None and reader.flaw):
                    continue
                if ours == theirs:
                    num_same += 1
                else:
                    difference = f"message {num_same + 1}: {_difference(ours, theirs)}"
            return ReplayComparison(num_same, difference, dict(counts), num_bytes, reader.flaw)


def _sent(reader: f.RecordingReader) -> Iterator[f.Sent]:
    return (entry for entry in reader if isinstance(entry, f.Sent))


def _kind(sent: f.Sent) -> str:
    return "clients" if sent.peer.startswith("client ") else sent.peer


def _difference(ours: f.Sent | None, theirs: f.Sent | None) -> str:
    """Describe both messages from a little before their first difference."""
    one, other = _words(ours), _words(theirs)
    offset = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    if one == other:
        return f"{_cut(one, 0)} has different arrays"
    return f"{_cut(one, offset)}, expected {_cut(other, offset)}"


def _cut(text: str, offset: int) -> str:
    """The start of a text, and the part around `offset`."""
    head, _, rest = text.partition(": ")
    begin = max(0, offset - len(head) - SHOWN_BEFORE)
    shown = rest[begin : begin + SHOWN_CHARS]
    return head + (f": {'… ' if begin else ''}{shown}{' …' if begin + SHOWN_CHARS < len(rest) else ''}" if rest else "")


def _words(sent: f.Sent | None) -> str:
    if sent is None:
        return "nothing"
    is_message = not sent.peer.startswith("client ")
    text = str(msgspec.msgpack.decode(sent.body) if is_message else sent.body)
    return f"to {sent.peer}: {text}"
