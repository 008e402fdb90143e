"""Recordings of detokenize: ended, begun again, and begun in the middle."""

import threading
import time
from pathlib import Path

import msgspec
import pytest

from pipeline.replay import format as f
from pipeline.replay.compare import compare
from pipeline.replay.recorder import FileWriter
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import settled
from tests.stages.replays import TEXT_FACTS, end_record, entries, order, replay_partial, replays_alike, state_of, talk


def test_a_replay_of_detokenize_sends_the_same_also_in_its_own_process(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "detokenize.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        rig.send(m.Reject(99, 1, 0, m.Failure(400, "no")), "schedule.0")
        rig.receive("gateway", m.Rejected)
        rig.load()
    comparison = replays_alike("detokenize", recording)
    assert set(comparison.sent) == {"gateway.0", "schedule.0"}
    assert replays_alike("detokenize", recording, inline=False) == comparison
    arrays = [
        len(array) for one in entries(recording) if isinstance(one, f.LoopTurn) for a in one.arrays for array in a
    ]
    assert max(arrays) > 4096, "the file contains the data from shared memory"


def test_ending_a_recording_does_not_wait_for_the_disk(
    text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    write = FileWriter._write

    def stuck(self: FileWriter, data: bytes) -> None:
        assert let_go.wait(20)
        write(self, data)

    monkeypatch.setattr(FileWriter, "_write", stuck)
    recording, path = tmp_path / "stuck.rec", str(tmp_path / "stuck.rec")
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(order(recording, TEXT_FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        talk(rig, 10)
        state = state_of(rig, m.EndRecord(2, path))
        assert state.ended and state.num_pending_bytes > 0 and not state.is_closed
        rig.load()  # the loop continues while nothing can be written
        rig.send(order(recording, TEXT_FACTS))
        assert "is still writing its last recording into" in rig.receive("supervisor", m.Answer).error
        let_go.set()
        assert end_record(rig, recording) == recording.stat().st_size
        rig.send(m.EndRecord(3, path))
        assert "not being recorded" in rig.receive("supervisor", m.Answer).error
    with f.RecordingReader(recording) as reader:
        assert f.Sent in set(map(type, reader))
        assert reader.end == f.End("who began it ended it")


def test_an_idle_stage_can_be_recorded_again_after_its_recorder_is_gone(text_dir: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.rec", tmp_path / "second.rec"
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(msgspec.structs.replace(order(first, TEXT_FACTS), lease_s=30.0))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.send(order(second, TEXT_FACTS))
        assert "is already being recorded" in rig.receive("supervisor", m.Answer).error
        assert not state_of(rig, m.KeepRecord(2, str(first))).ended
        assert state_of(rig, m.KeepRecord(2, str(second))).is_closed, "that is another recording"
        end_record(rig, first)
        rig.send(msgspec.structs.replace(order(first, TEXT_FACTS), lease_s=1e-3))
        assert rig.receive("supervisor", m.Answer).error == ""
        end = time.monotonic() + 20
        while True:  # only these messages wake the stage
            rig.send(order(second, TEXT_FACTS))
            if rig.receive("supervisor", m.Answer).error == "":
                break
            assert time.monotonic() < end
        assert not state_of(rig, m.KeepRecord(2, str(second))).ended


def test_a_recording_started_in_the_middle_omits_earlier_sequences(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "late.rec"
    with Rig("detokenize", model_dir=text_dir) as rig:
        rig.start(TEXT_FACTS)
        rig.send(opening(7), "schedule.0")
        rig.send(settled([(7, 0, ids_of("early"), m.Finish.NONE)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
        rig.send(order(recording, TEXT_FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        talk(rig, 10)
        rig.send(settled([(7, 5, ids_of(" late"), m.Finish.LENGTH)]), "schedule.0")
        assert rig.receive("gateway", m.Deltas).texts == [" late"]
        assert end_record(rig, recording) == recording.stat().st_size
        rig.send(m.EndRecord(3))
        assert "not being recorded" in rig.receive("supervisor", m.Answer).error
    counts = replay_partial("detokenize", recording).counts
    assert counts["entries of earlier sequences"] == 1
    out = compare(recording.with_suffix(".out0"), None)
    with Rig("detokenize", model_dir=text_dir, record=tmp_path / "alone.rec") as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 10)
    assert set(out.sent) == set(compare(tmp_path / "alone.rec", None).sent)
