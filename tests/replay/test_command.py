"""`pipeline replay` and `pipeline serve --record`: output and exit codes."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.replay import format as f
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.detokenize.vocabularies import byte_level, save
from tests.stages.replays import TEXT_FACTS, talk


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    log = logging.getLogger("pipeline")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    save(byte_level(), tmp_path)
    path = tmp_path / "detokenize.rec"
    with Rig("detokenize", model_dir=tmp_path, record=path) as rig:
        rig.start(TEXT_FACTS)
        talk(rig, 1)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        code = main(list(map(str, argv)))
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        code = stopped.code
    return code, *capsys.readouterr()


def test_a_replay_reports_its_input_and_output_and_that_they_match(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "replay", "detokenize", recording, "--inline")
    assert code == 0
    assert "recorded from its start" in out
    assert "sent to gateway.0" in out
    assert "same as in" in out and "byte for byte" in out


def test_a_replay_that_differs_reports_the_place_and_exits_with_3(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with f.RecordingReader(recording) as reader:
        header, entries = reader.header, list(reader)
    entries = [
        one if not isinstance(one, f.Sent) else f.Sent(one.peer, one.body.replace(b"hello", b"HELLO"), one.arrays)
        for one in entries
    ]
    (tmp_path / "other").write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *entries, f.End("")])))
    code, out, _ = run(capsys, "replay", "detokenize", recording, "--inline", "--expect", tmp_path / "other")
    assert code == 3
    assert "differs from" in out and "message 1: to gateway.0" in out and "HELLO" in out


def test_a_truncated_recording_is_replayed_up_to_the_cut(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.rec"
    cut.write_bytes(recording.read_bytes()[:-40])
    code, out, _ = run(capsys, "replay", "detokenize", cut, "--inline")
    assert code == 0
    assert "it is truncated" in out and "are ignored" in out and "same as in" in out


def test_errors_are_clear(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign").write_bytes(b"not a recording at all")
    for argv, words, expected in (
        (("replay", "detokenize", tmp_path / "foreign"), "is not a recording", 1),
        (("replay", "detokenize", tmp_path / "none"), "No such file", 1),
        (("replay", "schedule", recording), "is a recording of detokenize.0, not of schedule", 1),
        (("replay", "detokenize", recording, "--out", recording, "--inline"), "is the recording itself", 1),
        (("replay", "detokenize", recording, "--out", tmp_path), "can't be written", 2),
        (("replay", "detokenise", recording), "invalid choice", 2),
        (("record", "schedule", "--out", tmp_path / "x", "--seconds", "0"), "needs a number of seconds above 0", 2),
        (("record", "schedule", "--out", tmp_path / "x", "--pid", "1"), "no server has pid 1", 1),
        (("serve", "--record", "schedule"), "needs STAGE=FILE", 2),
        (("serve", "--record", "nothing=x"), "there is no stage 'nothing'", 2),
        (("serve", "--record", f"schedule={tmp_path}"), "can't be written", 2),
        (("serve", "--set", "ingest.replicas=2", "--record", f"ingest={tmp_path}/x"), "choose one of ingest.0", 2),
        (("serve", "--record", f"ingest={tmp_path}/x", "--record", f"schedule={tmp_path}/x"), "into one file", 2),
        (("serve", "--break", "a:b"), "--break needs --foreground", 2),
        (("serve", "--inline", "--foreground", "ingest"), "--inline runs all stages", 2),
        (("serve", "--foreground", "kitchen"), "there is no stage 'kitchen'", 2),
    ):
        code, _, err = run(capsys, *argv)
        assert words in err, (argv, err)
        assert code == expected, argv
    assert recording.stat().st_size > 1000, "the recording was not overwritten"


def test_messages_of_another_version_are_errors(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with f.RecordingReader(recording) as reader:
        header = reader.header
    strange = f.LoopTurn(1, ["schedule.0"], [1], [b"\x91\xa6dances"], [[]])
    outside = f.LoopTurn(1, ["schedule.0"], [1], [_settled_beyond()], [[b"x" * 9]])
    for entry, words in ((strange, "is not valid in this version"), (outside, "is not in a segment of the recording")):
        (tmp_path / "r").write_bytes(f.MAGIC + f.frame(header) + f.frame(entry) + f.frame(f.End("")))
        code, _, err = run(capsys, "replay", "detokenize", tmp_path / "r", "--inline")
        assert code == 1
        assert words in err


def _settled_beyond() -> bytes:
    import msgspec

    from pipeline.shm.arrays import ShmRef

    return msgspec.msgpack.encode(m.Settled(ShmRef("schedule.0", 2**40, 9, 1), b"", b"", b"", b""))
