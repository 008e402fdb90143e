"""The report about a process that died: its contents, how many are kept, and folders that can't be written."""

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import own_files
from pipeline.config.settings import Settings
from pipeline.runtime.process import black_box
from pipeline.supervisor.crashes import crash_reports
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from pipeline.supervisor.crashes.crash_reports import CrashReports
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.version import VERSION


class DeadChild:
    node = ""

    def __init__(self, *, state: str = "ready", exit_code: int = -9) -> None:
        self.name, self.pid, self.incarnation, self.started_s = "ingest.0", os.getpid(), 2, 0.0
        self.state, self.exit_code, self.is_alive = state, exit_code, True


def settings_of(folder: Path, **supervisor: Any) -> Settings:
    section = msgspec.structs.replace(Settings().supervisor, **supervisor)
    return Settings(cache_dir=str(folder), supervisor=section, log_level="debug")


@pytest.fixture
def resources() -> Iterator[SharedResources]:
    resources = SharedResources(Settings(), [], [], None)
    try:
        resources.create_arenas()
        resources.create_rings()
        yield resources
    finally:
        resources.close()


@pytest.fixture
def boxes() -> Iterator[BlackBoxes]:
    boxes = BlackBoxes(Settings())
    boxes.create("ingest.0", 2)
    yield boxes
    boxes.close()


def died(settings: Settings, boxes: BlackBoxes, child: DeadChild | None = None, times: int = 1) -> dict[str, str]:
    """The fields of the log's last line, once all reports are written."""
    reports = CrashReports(settings, boxes, logging.getLogger("test"))
    one: Any = child or DeadChild()
    reports.turn([one])
    fields = [reports.died(one, "was killed by SIGKILL") for _ in range(times)]
    reports.close()
    return fields[-1]


def test_a_report_has_what_the_process_left(
    tmp_path: Path, boxes: BlackBoxes, caplog: pytest.LogCaptureFixture
) -> None:
    box = boxes.get("ingest.0", 2)
    assert box is not None
    memory = black_box.attach(box)
    black_box.Breadcrumb(memory).at(0x1F3A, 2)
    black_box.LogRing(memory).keep(b"the last line\n")
    os.write(box.stacks_fd, b"Fatal Python error: Aborted\n")
    os.write(box.recording_fd, b"a recording")
    folder = Path(died(settings_of(tmp_path), boxes)["report"])
    assert folder.parent == tmp_path / "crashes"
    assert folder.name.endswith(f"Z-{os.getpid()}-ingest.0-2")
    assert {path.name: path.read_text() for path in folder.iterdir() if path.name != "report.json"} == {
        "stacks.txt": "Fatal Python error: Aborted\n",
        "log.txt": "the last line\n",
        "recording": "a recording",
    }
    report = json.loads((folder / "report.json").read_bytes())
    assert report.pop("uptime_s") > 0 and report.pop("died_at").endswith("+00:00")
    assert report.pop("rss_bytes") > 1024**2
    assert report == {
        "stage": "ingest.0",
        "pid": os.getpid(),
        "incarnation": 2,
        "version": VERSION,
        "reason": "was killed by SIGKILL",
        "exit_code": None,
        "signal": "SIGKILL",
        "request_id": "1f3a",
        "attempt": 2,
        "settings": {"cache_dir": str(tmp_path), "log_level": "debug"},
    }
    assert "stacks of ingest.0:\nFatal Python error: Aborted" in caplog.text
    assert folder.stat().st_mode & 0o077 == 0, "only this user may read it"


def test_what_the_process_did_not_leave_has_no_file(tmp_path: Path, boxes: BlackBoxes) -> None:
    folder = Path(died(settings_of(tmp_path), boxes, DeadChild(exit_code=1))["report"])
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    report = json.loads((folder / "report.json").read_bytes())
    assert (report["exit_code"], report["signal"], report["request_id"]) == (1, None, None)


def test_a_signal_without_a_name_has_a_number(tmp_path: Path, boxes: BlackBoxes) -> None:
    folder = Path(died(settings_of(tmp_path), boxes, DeadChild(exit_code=-37))["report"])
    assert json.loads((folder / "report.json").read_bytes())["signal"] == "signal 37"


def test_the_newest_20_are_kept(tmp_path: Path, boxes: BlackBoxes) -> None:
    folder = tmp_path / "crashes"
    for number in range(30):
        name = f"202601{number + 1:02}T000000.000000Z-1-execute.0-1"
        (folder / (f".partial-{name}" if number % 2 else name)).mkdir(parents=True)
    newest = died(settings_of(tmp_path), boxes, times=2)["report"]
    left = crash_reports.reports_in(folder)
    assert len(left) == crash_reports.MAX_REPORTS
    assert left[0] == Path(newest)
    assert left[-1].name.startswith("20260113T")


def test_the_newest_of_each_server_are_kept_too(tmp_path: Path, boxes: BlackBoxes) -> None:
    folder = tmp_path / "crashes"
    for number in range(8):
        (folder / f"20251201T00000{number}.000000Z-{7 + number // 4}-execute.0-1").mkdir(parents=True)
    for number in range(30):
        (folder / f"202601{number + 1:02}T000000.000000Z-1-execute.0-1").mkdir()
    died(settings_of(tmp_path), boxes)
    names = [path.name for path in crash_reports.reports_in(folder)]
    assert len(names) == crash_reports.MAX_REPORTS + 2 * crash_reports.MAX_OF_SERVER
    assert [name[14] for name in names[-6:]] == list("765321")


def test_a_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, boxes: BlackBoxes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "crashes").write_text("a file")
    assert died(settings_of(tmp_path), boxes, times=3) == {}
    assert [record.getMessage() for record in caplog.records] == ["crash reports can't be written"]
    assert "crashes" in caplog.records[0].fields["why"]  # type: ignore[attr-defined]


def test_an_unknown_user_in_cache_dir_is_reported_too(boxes: BlackBoxes, caplog: pytest.LogCaptureFixture) -> None:
    assert died(settings_of(Path("~no-such-user-here/cache")), boxes) == {}
    assert "crash reports can't be written" in caplog.text


@pytest.mark.parametrize(
    ("supervisor", "child", "expected"),
    [
        ({"crash_reports": False}, DeadChild(), False),
        ({}, DeadChild(state="starting", exit_code=1), False),
        ({}, DeadChild(state="starting", exit_code=-11), True),
        ({}, DeadChild(state="recovering", exit_code=1), True),
    ],
)
def test_crash_reports_can_be_off_and_a_stage_that_says_why_it_cannot_start_has_none(
    tmp_path: Path, boxes: BlackBoxes, supervisor: dict[str, Any], child: DeadChild, expected: bool
) -> None:
    fields = died(settings_of(tmp_path, **supervisor), boxes, child)
    assert bool(fields) == (tmp_path / "crashes").exists() == expected


def test_only_this_user_may_read_a_report(tmp_path: Path, boxes: BlackBoxes) -> None:
    box = boxes.get("ingest.0", 2)
    assert box is not None
    os.write(box.recording_fd, b"a recording")
    before = os.umask(0)
    try:
        folder = Path(died(settings_of(tmp_path), boxes)["report"])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, *folder.iterdir())}
    assert modes.pop("crashes") == modes.pop(folder.name) == 0o700
    assert set(modes) >= {"recording", "report.json"} and set(modes.values()) == {0o600}


@pytest.mark.parametrize("theirs", ["folder", "link"])
def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, boxes: BlackBoxes, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    """As in a cache that several users share. There, others could put links in place of the files of a report."""
    (tmp_path / "elsewhere").mkdir(mode=0o777)
    crashes = tmp_path / "crashes"
    crashes.symlink_to("elsewhere") if theirs == "link" else crashes.mkdir()
    number, is_trusted = crashes.lstat().st_ino, own_files.is_trusted
    monkeypatch.setattr(own_files, "is_trusted", lambda info: is_trusted(info) and info.st_ino != number)
    folder = Path(died(settings_of(tmp_path), boxes)["report"])
    assert folder.parent == tmp_path / f"crashes-{os.geteuid()}" and (folder / "report.json").is_file()
    assert not list(crashes.iterdir())


def test_a_folder_in_place_of_the_open_one_gets_nothing(
    tmp_path: Path, boxes: BlackBoxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder above may rename it at any moment."""
    box = boxes.get("ingest.0", 2)
    assert box is not None
    os.write(box.recording_fd, b"prompts")
    (victim := tmp_path / "victim").write_text("precious")
    write = CrashReports._write
    crashes = tmp_path / "crashes"

    def late(self: CrashReports, opened: Any, name: str, *rest: Any) -> None:
        crashes.rename(tmp_path / "moved")
        partial = crashes / f".partial-{name}"
        partial.mkdir(parents=True)
        for file in ("recording", "report.json"):
            (partial / file).symlink_to(victim)
        write(self, opened, name, *rest)

    monkeypatch.setattr(CrashReports, "_write", late)
    name = Path(died(settings_of(tmp_path), boxes)["report"]).name
    assert victim.read_text() == "precious"
    assert (tmp_path / "moved" / name / "recording").read_bytes() == b"prompts"


def test_what_is_no_report_is_not_removed(tmp_path: Path, boxes: BlackBoxes) -> None:
    for number in range(40):
        (tmp_path / "crashes" / f"mine-{number}").mkdir(parents=True)
    died(settings_of(tmp_path), boxes)
    assert len(list((tmp_path / "crashes").glob("mine-*"))) == 40
