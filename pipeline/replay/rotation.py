"""Makes room in the recording of a crash that is full: its older half goes.

    header │ older half                  │ newer half, from its first whole wake on │ full
    header │ newer half                                                             │ room again

What is left is a recording that began while the stage was running (partial.py). The frames stay as they are, so this
takes as long as copying them.
"""

import msgspec

from pipeline.replay import format as f
from pipeline.runtime import messages as m

START = msgspec.msgpack.encode("start")
"""The tag in an encoded `Start`."""
MAX_FRAMES = 10_000
"""The stage's `Start` is among so many first frames, and a turn ends within so many."""

_start = msgspec.msgpack.Decoder(m.Start)


def facts_in(memory: memoryview, num_bytes: int) -> m.ExecuteFacts | None:
    """The facts in the `Start` that a recording has at its beginning; None if there is none."""
    for offset, kind, end in f.raw_frames(memory, len(f.MAGIC), num_bytes, MAX_FRAMES):
        if kind & f.KINDS == f.MESSAGE and not kind & f.HAS_ARRAYS:
            body = bytes(memory[offset + f.HEAD_BYTES : end])
            if START in body[: len(START) + 8]:
                return _start.decode(body).facts
    return None


def turn_behind(memory: memoryview, begin: int, num_bytes: int) -> tuple[int, float] | None:
    """Where the first whole wake begins behind a frame that begins at `begin`, and its time; None if there is none."""
    has_ended, found = False, -1
    for offset, kind, _ in f.raw_frames(memory, begin, num_bytes, MAX_FRAMES):
        is_turn = kind in (f.TURN, f.TURN_AND_CLOCK)
        if has_ended and found < 0 and (is_turn or kind & f.KINDS == f.MESSAGE):
            found = offset
        if is_turn and found >= 0:
            return found, f.seconds_in(memory, offset)
        has_ended |= is_turn
    return None
