"""Record a stage in its rig, and replay the recording."""

from pathlib import Path

from pipeline.cli.replay.replaying import Replayed, replay
from pipeline.replay import format as f
from pipeline.replay.compare import ReplayComparison, compare
from pipeline.runtime import messages as m


def entries(path: Path) -> list[f.Entry]:
    with f.RecordingReader(path) as reader:
        return list(reader)


def messages_in(path: Path) -> int:
    return sum(len(one.bodies) for one in entries(path) if isinstance(one, f.LoopTurn))


def replays_alike(stage: str, recording: Path, *, inline: bool = True) -> ReplayComparison:
    """Replay twice: both write the same bytes, and the messages of the recorded stage. Returns the comparison."""
    outs = [recording.with_suffix(f".out{i}") for i in range(2)]
    for out in outs:
        replay(stage, recording, out, paced=False, inline=inline)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    comparison = compare(outs[0], recording)
    assert comparison.are_same, comparison.difference
    assert comparison.num_same == sum(comparison.sent.values()) > 0
    return comparison


def replay_partial(stage: str, recording: Path) -> Replayed:
    """Replay a recording started in the middle, twice: both write the same bytes. Returns the counts."""
    outs = [recording.with_suffix(f".out{i}") for i in range(2)]
    replayed = [replay(stage, recording, out, paced=False, inline=True) for out in outs]
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert not replayed[0].header.from_start
    return replayed[0]


def order(path: Path, facts: m.ExecuteFacts | None = None) -> m.Record:
    return m.Record(1, str(path), facts=facts)
