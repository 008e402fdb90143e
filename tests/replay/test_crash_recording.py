"""The recording of a process that replaced a dead one: it has the message that kills the process, and is bounded."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import Settings
from pipeline.replay import format as f
from pipeline.replay.crash_recording import END_BYTES, CrashRecording
from pipeline.replay.recorder import RecordingContext, header_of
from pipeline.runtime import messages as m
from pipeline.runtime.transport.memories import Memories
from pipeline.shm.arrays import ShmRef
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import settled
from tests.stages.detokenize.vocabularies import byte_level, save
from tests.stages.replays import TEXT_FACTS, end_record, order, talk

FATAL = m.Settled(
    seqs=np.array([12345], "<u8").tobytes(),
    starts=np.array([0], "<i4").tobytes(),
    counts=np.array([1], "<i4").tobytes(),
    ids=np.array([1], "<i4").tobytes(),
    finishes=bytes(1),
    settled_s=0.0,
)
"""Names a sequence that was never opened."""


@pytest.fixture
def box() -> Iterator[m.BlackBox]:
    boxes = BlackBoxes(Settings())
    yield boxes.create("detokenize.0", 2)
    boxes.close()


def rig_of(folder: Path, box: m.BlackBox) -> Rig:
    save(byte_level(), folder)
    rig = Rig("detokenize", model_dir=folder)
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box)
    return rig


def size(box: m.BlackBox) -> int:
    return os.fstat(box.recording_fd).st_size


def test_a_replay_meets_the_message_that_killed_the_process(tmp_path: Path, box: m.BlackBox) -> None:
    with pytest.raises(AssertionError, match="sequence 12345 is not open"), rig_of(tmp_path, box) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        rig.send(FATAL, "schedule.0")
        rig.receive("gateway", m.Rejected)  # never comes: raises what the stage raised
    path = tmp_path / "recording"
    path.write_bytes(os.pread(box.recording_fd, size(box), 0))
    with f.RecordingReader(path) as reader:
        wakes = [entry for entry in reader if isinstance(entry, f.LoopTurn)]
    assert wakes[-1].bodies[-1] == msgspec.msgpack.encode(FATAL)
    with pytest.raises(AssertionError, match="sequence 12345 is not open"):
        replay("detokenize", path, tmp_path / "sent", paced=False, inline=True)


@pytest.mark.parametrize("num_talks", [8, 9, 30])
def test_a_full_recording_drops_its_older_half(tmp_path: Path, box: m.BlackBox, num_talks: int) -> None:
    max_bytes = 300_000
    box = msgspec.structs.replace(box, recording_bytes=max_bytes)
    sizes = []
    fatal = settled([(12345, 7, ids_of("x"), m.Finish.NONE)])
    with pytest.raises(AssertionError, match="are missing"), rig_of(tmp_path, box) as rig:
        rig.start(TEXT_FACTS)
        for number in range(num_talks):
            talk(rig, 10 * number + 1)
            sizes.append(size(box))
        rig.send(opening(12345, m.GenerationOptions()), "schedule.0")
        rig.send(fatal, "schedule.0")
        rig.receive("gateway", m.Rejected)  # never comes: raises what the stage raised
    assert max(sizes) <= max_bytes + END_BYTES and sorted(sizes) != sizes, "it was full"
    path = tmp_path / "recording"
    path.write_bytes(os.pread(box.recording_fd, size(box), 0))
    with f.RecordingReader(path) as reader:
        assert not reader.header.from_start and reader.header.facts == TEXT_FACTS
        wakes = [entry for entry in reader if isinstance(entry, f.LoopTurn)]
    assert len(wakes) > 1 and wakes[0].time_ns == 0 and wakes[-1].bodies[-1] == msgspec.msgpack.encode(fatal)
    with pytest.raises(AssertionError, match="are missing"):
        replay("detokenize", path, tmp_path / "sent", paced=False, inline=True)


def test_a_full_recording_without_a_whole_wake_is_dropped(tmp_path: Path, box: m.BlackBox) -> None:
    with rig_of(tmp_path, msgspec.structs.replace(box, recording_bytes=5000)) as rig:
        rig.start(TEXT_FACTS)
        rig.load()
        assert 0 < size(box) <= 5000 + END_BYTES
        talk(rig, 1)
        assert size(box) == 0
        talk(rig, 10)
    assert size(box) == 0


def test_a_recording_that_a_user_begins_takes_its_place(tmp_path: Path, box: m.BlackBox) -> None:
    path = tmp_path / "detokenize.rec"
    with rig_of(tmp_path, box) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        assert size(box) > 0
        rig.send(m.EndRecord(1))
        assert "is not being recorded" in rig.receive("supervisor", m.Answer).error
        rig.send(order(path))
        assert rig.receive("supervisor", m.Answer).error == ""
        assert size(box) == 0
        for _ in range(3):  # it begins with the next complete wake
            rig.load()
        talk(rig, 10)
        end_record(rig, path)
        talk(rig, 20)
    assert size(box) == 0
    with f.RecordingReader(path) as reader:
        assert any(isinstance(entry, f.Sent) for entry in reader)


def test_it_has_the_entries_of_an_ordinary_recording(tmp_path: Path, box: m.BlackBox) -> None:
    save(byte_level(), tmp_path)
    with Rig("detokenize", model_dir=tmp_path) as rig:
        launch, log = rig.launch, logging.getLogger("pipeline")
    memories = Memories()
    memories.add("schedule.0", memoryview(bytes(range(200))))
    crash = CrashRecording(lambda: launch, box, memories, log)
    order = m.Record(0, str(tmp_path / "ordinary"), with_sent=False)
    ordinary = RecordingContext(order, header_of(launch, order, from_start=True), memories, log)
    parts = [ShmRef("schedule.0", begin, 50, 1) for begin in (0, 100)]
    messages = [FATAL, msgspec.structs.replace(FATAL, ids=parts[0], token_outputs=parts[1]), m.Ping(7)]
    for context in (crash, ordinary):
        for number in (0, 1, 3):
            for incarnation, message in enumerate(messages[:number], 1):
                context.received("schedule.0", incarnation, msgspec.msgpack.encode(message), message)
            context.end_turn()
            context.monotonic()
            context.event("open", 5, b"data")
        context.randbits(64)
    ordinary.close()
    path = tmp_path / "crash"
    path.write_bytes(os.pread(box.recording_fd, size(box), 0))
    found = []
    for each in (path, tmp_path / "ordinary"):
        with f.RecordingReader(each) as reader:
            found.append([_without_times(entry) for entry in reader])
            assert bool(reader.flaw) == (each == path), "one has no end: its process has died"
    assert found[0] == found[1] and len(found[0]) == 10
    wakes = [entry for entry in found[0] if isinstance(entry, f.LoopTurn)]
    assert [len(wake.bodies) for wake in wakes] == [0, 1, 3]
    assert wakes[2].arrays == [[], [bytes(range(50)), bytes(range(100, 150))], []]


def _without_times(entry: f.Entry) -> f.Entry:
    if isinstance(entry, f.LoopTurn):
        assert entry.time_ns > 0
        return msgspec.structs.replace(entry, time_ns=0)
    return msgspec.structs.replace(entry, number=0) if isinstance(entry, f.Value) else entry
