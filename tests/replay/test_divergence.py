"""The replay of a stage that deviates from the recorded one reports the deviation and its place."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.errors import UserError
from pipeline.replay import format as f
from tests.rig import Rig
from tests.stages.schedule.neighbours import FACTS, Neighbours


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a schedule stage, which reads the clock once per turn."""
    path = tmp_path_factory.mktemp("recorded") / "schedule.rec"
    with Rig("schedule", record=path) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=5)
        around.until_finished(1)
        rig.load()
    return path


def edited(path: Path, edit: Callable[[list[f.Entry]], None], folder: Path, *, from_start: bool = True) -> Path:
    """A copy of a recording with edited entries."""
    with f.RecordingReader(path) as reader:
        header = msgspec.structs.replace(reader.header, from_start=from_start)
        entries: list[f.Entry] = [one for one in reader if not isinstance(one, f.End)]
    edit(entries)
    copy = folder / "edited.rec"
    copy.write_bytes(f.MAGIC + b"".join(f.frame(one) for one in (header, *entries, f.End("it was stopped"))))
    return copy


def index_of(entries: list[f.Entry], kind: type, number: int = 2) -> int:
    return [index for index, one in enumerate(entries) if isinstance(one, kind)][number]


def unchanged(entries: list[f.Entry]) -> None:
    assert entries


def without_a_value(entries: list[f.Entry]) -> None:
    del entries[index_of(entries, f.Value)]


def with_an_extra_value(entries: list[f.Entry]) -> None:
    entries.insert(index_of(entries, f.LoopTurn), f.Value("random", 7))


def with_a_message_refused(entries: list[f.Entry]) -> None:
    """The recorded stage sent to a neighbor to which this one sends nothing."""
    entries.insert(index_of(entries, f.LoopTurn), f.SendRefused("gateway.0"))


CASES = [
    (without_a_value, "the stage reads monotonic here, the recorded one did not"),
    (with_an_extra_value, "the recorded stage read random here, this one did not"),
    (with_a_message_refused, "the recorded stage sent to gateway.0 here, this one did not"),
]


def test_an_unchanged_recording_replays(recording: Path, tmp_path: Path) -> None:
    replay("schedule", edited(recording, unchanged, tmp_path), tmp_path / "out", paced=False, inline=True)


@pytest.mark.parametrize(("edit", "problem"), CASES)
def test_from_the_start_every_difference_ends_the_replay(
    recording: Path, tmp_path: Path, edit: Callable[[list[f.Entry]], None], problem: str
) -> None:
    copy = edited(recording, edit, tmp_path)
    with pytest.raises(UserError, match=problem):
        replay("schedule", copy, tmp_path / "out", paced=False, inline=True)


@pytest.mark.parametrize(("edit", "problem"), CASES)
def test_a_recording_from_the_middle_is_followed_loosely(
    recording: Path, tmp_path: Path, edit: Callable[[list[f.Entry]], None], problem: str
) -> None:
    """The stage's earlier state is unknown, so it may deviate."""
    copy = edited(recording, edit, tmp_path, from_start=False)
    replay("schedule", copy, tmp_path / "out", paced=False, inline=True)
