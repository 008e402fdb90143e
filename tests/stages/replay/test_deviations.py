"""A replay reports where it deviates, repeats refused sends, and can take as long as the recording."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.replay.compare import compare
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.detokenize.test_output_processor import ids_of, opening
from tests.stages.detokenize.test_stage import settled
from tests.stages.replays import TEXT_FACTS, entries, messages_in, talk


def test_a_deviation_is_reported_with_its_position(text_dir: Path, tmp_path: Path) -> None:
    recording, changed = tmp_path / "a.rec", tmp_path / "b.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
    with f.RecordingReader(recording) as reader:
        frames = [f.frame(reader.header)]
        for one in reader:
            if isinstance(one, f.LoopTurn) and any(
                b"\xa6settled" in body or b"\xa7settled" in body for body in one.bodies
            ):
                frames.append(f.frame(f.Value("monotonic", 1.0)))
            frames.append(f.frame(one))
        frames.append(f.frame(f.End("changed")))
    changed.write_bytes(f.MAGIC + b"".join(frames))
    with pytest.raises(UserError, match=r"after wake \d+: the recorded stage read monotonic here"):
        replay("detokenize", changed, tmp_path / "out", paced=False, inline=True)
    with pytest.raises(UserError, match=r"after wake \d+: the recorded stage read monotonic here"):
        replay("detokenize", changed, tmp_path / "out", paced=False, inline=False)


def test_a_replay_repeats_refused_sends(text_dir: Path, tmp_path: Path) -> None:
    recording, changed = tmp_path / "a.rec", tmp_path / "b.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        rig.send(opening(1), "schedule.0")
        rig.load()
        rig.send(settled([(1, 0, ids_of("ab"), m.Finish.NONE)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
        rig.send(settled([(1, 2, ids_of("cd"), m.Finish.LENGTH)]), "schedule.0")
        rig.receive("gateway", m.Deltas)
    with f.RecordingReader(recording) as reader:
        header, all_entries = reader.header, list(reader)
    index = next(i for i, one in enumerate(all_entries) if isinstance(one, f.Sent))
    all_entries[index] = f.SendRefused("gateway.0")
    changed.write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *all_entries, f.End("changed")])))
    replay("detokenize", changed, tmp_path / "out", paced=False, inline=True)
    (deltas,) = [
        msgspec.msgpack.decode(one.body, type=m.Deltas) for one in entries(tmp_path / "out") if isinstance(one, f.Sent)
    ]
    assert deltas.texts == ["abcd"], "refused output is sent with the next message"


def test_a_paced_replay_takes_as_long_as_the_recording(text_dir: Path, tmp_path: Path) -> None:
    recording = tmp_path / "a.rec"
    with Rig("detokenize", model_dir=text_dir, record=recording) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
        rig.nothing("gateway", 0.3)
        talk(rig, 10)
    last_s = max(one.time_ns for one in entries(recording) if isinstance(one, f.LoopTurn)) / 1e9
    assert last_s > 0.3
    paced = replay("detokenize", recording, tmp_path / "out", paced=True, inline=True)
    assert paced.took_s >= last_s
    assert compare(tmp_path / "out", recording).are_same
    assert paced.counts["messages"] == messages_in(recording)
    assert np.isclose(paced.took_s, last_s, atol=5.0)
