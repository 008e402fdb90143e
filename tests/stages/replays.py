"""Record a stage in its rig, and replay the recording."""

import time
from pathlib import Path

import msgspec

from pipeline.cli.replay.replaying import Replayed, replay
from pipeline.replay import format as f
from pipeline.replay.compare import ReplayComparison, compare
from pipeline.replay.recorder import RecordState
from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import receive_until_closed, settled


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


TEXT_FACTS = m.ExecuteFacts(num_blocks=8, block_size=16, max_model_len=128, vocab_size=420)


def talk(rig: Rig, first: int, num: int = 3) -> None:
    """Some sequences from opening to end; the ids of the second report are in shared memory."""
    arena = rig.arena("schedule.0")
    seqs = range(first, first + num)
    for seq in seqs:
        rig.send(opening(seq, m.GenerationOptions(stop=["STOP"])), "schedule.0")
    rig.send(settled([(seq, 0, ids_of("hello "), m.Finish.NONE) for seq in seqs]), "schedule.0")
    long = "x🤖" * 700
    big = settled(
        [(seq, 6, ids_of(long), m.Finish.NONE) for seq in seqs],
        lambda array: arena.put(array.tobytes(), readers=("detokenize.0",)),
    )
    assert isinstance(big.ids, ShmRef)
    rig.send(big, "schedule.0")
    end = 6 + len(ids_of(long))
    rig.send(settled([(seq, end, ids_of("STOP and more"), m.Finish.NONE) for seq in seqs]), "schedule.0")
    rig.send(settled([(seq, end + 13, [], m.Finish.ABORT) for seq in seqs]), "schedule.0")
    receive_until_closed(rig, *seqs)


def state_of(rig: Rig, control_request: m.EndRecord | m.KeepRecord) -> RecordState:
    rig.send(control_request)
    answer = rig.receive("supervisor", m.Answer)
    assert answer.error == ""
    return msgspec.msgpack.decode(answer.body, type=RecordState)


def end_record(rig: Rig, path: Path) -> int:
    """End a recording and wait until it is written. Returns its size."""
    end = time.monotonic() + 20
    while not (state := state_of(rig, m.EndRecord(2, str(path)))).is_closed:
        assert time.monotonic() < end, state
    return state.num_bytes
