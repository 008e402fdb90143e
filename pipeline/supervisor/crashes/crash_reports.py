"""Crash reports: what is known about the death of a stage's process, in a folder.

    <cache_dir>/crashes/<UTC time>-<pid of the server>-<stage>.<replica>-<incarnation>/
        report.json   how it ended; see `CrashReport`
        stacks.txt    the stacks of its threads, if it had the time to write them
        log.txt       its last log lines
        recording     what it received since its start, for `pipeline replay`; only of processes that replaced another,
                      unless supervisor.record_first_processes is set

The contents are read from the black box at once; a thread writes them, so that a slow disk delays no restart. The
folder gets its name when it is complete.
"""

import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config.settings import Settings
from pipeline.own_files import OpenFolder, own_folder
from pipeline.runtime import messages as m
from pipeline.runtime.files.cache_path import CRASHES, cache_path
from pipeline.runtime.files.private_files import create_private
from pipeline.runtime.process import black_box
from pipeline.runtime.process.process_usage import rss_bytes
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from pipeline.supervisor.processes.child import Child, signal_name
from pipeline.version import VERSION

MAX_REPORTS, MAX_OF_SERVER, MAX_REPORTS_WITH_THOSE = 20, 3, 60
"""Reports that are kept: the newest, and the newest of each server that shares the folder, so that one whose stages die
again and again does not remove those of others; and the bound of both together."""
MAX_STACKS_BYTES = 256 * 1024
PARTIAL = ".partial-"
"""Prefix of a report that is being written, or whose writer was killed."""
NAME = re.compile(rf"({re.escape(PARTIAL)})?\d{{8}}T\d{{6}}\.\d{{6}}Z-\d+-[^/]+")
"""Of reports, complete or not. Nothing else is removed."""
SAMPLE_S = 1.0
"""The memory of each process is noted this often."""
CLOSE_S = 5.0
"""Maximum time to wait at the end for reports to be written."""


class CrashReport(msgspec.Struct, frozen=True):
    """The contents of report.json."""

    stage: str
    """Such as `execute.0`."""
    pid: int
    incarnation: int
    """1 is the stage's first process; each restart adds 1."""
    version: str
    died_at: str
    """UTC, in ISO 8601."""
    uptime_s: float
    reason: str
    """How it ended, or the error that ended it."""
    exit_code: int | None
    signal: str | None
    """The signal that killed it, such as `SIGSEGV`."""
    rss_bytes: int | None
    """Its memory at most a second or so before; five, if the server was idle."""
    request_id: str | None
    """The request that it was working on, as in log lines; only of ingest and schedule."""
    attempt: int | None
    settings: dict[str, Any]
    """Those that differ from the default, by dotted key."""


class CrashReports:
    """Writes the reports. `server_pid` is in their names."""

    def __init__(self, settings: Settings, boxes: BlackBoxes, log: logging.Logger, *, is_on: bool = True) -> None:
        self.settings = settings
        self._boxes = boxes
        self._log = log
        self._is_on = is_on and settings.supervisor.crash_reports
        self._rss_bytes: dict[int, int] = {}
        """By pid."""
        self._sampled_s = 0.0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Held while a report is written and old ones are removed."""
        self._has_failed = False
        """A report could not be written, which was logged."""

    def turn(self, children: Iterable[Child]) -> None:
        """Note the memory of all processes, if that is due."""
        now_s = time.monotonic()
        if self._is_on and now_s >= self._sampled_s + SAMPLE_S:
            self._sampled_s = now_s
            sampled = {child.pid: rss_bytes(child.pid) for child in children if child.is_alive and not child.node}
            self._rss_bytes |= {pid: num_bytes for pid, num_bytes in sampled.items() if num_bytes}

    def died(self, child: Child, reason: str) -> dict[str, str]:
        """A process has died: log the stacks of its threads, and begin to write its report. Returns the fields of its
        line in the log."""
        box = self._boxes.get(child.name, child.incarnation)
        if box is None:
            return {}
        stacks = black_box.stacks(box, MAX_STACKS_BYTES)
        if stacks:
            self._log.error(f"stacks of {child.name}:\n{stacks.decode(errors='replace').rstrip()}")
        rss = self._rss_bytes.pop(child.pid, None)
        # A stage that can't start says why. It has not crashed, unless a signal ended it.
        if not self._is_on or (child.state == "starting" and (child.exit_code or 0) >= 0):
            return {}
        now = datetime.now(UTC)
        report = _report(child, reason, now, box, self.settings, rss)
        name = f"{now:%Y%m%dT%H%M%S.%fZ}-{os.getpid()}-{child.name}-{child.incarnation}"
        try:
            opened = self._open()
        except (OSError, RuntimeError) as error:  # the latter for an unknown ~user
            self._failed(error)
            return {}
        try:
            (opened.path / f"{PARTIAL}{name}").mkdir(mode=0o700)
        except OSError as error:
            opened.close()
            self._failed(error)
            return {}
        files = {
            "report.json": msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n",
            "stacks.txt": stacks,
            "log.txt": black_box.last_lines(box),
        }
        recording_fd = os.dup(box.recording_fd) if box.recording_fd >= 0 else -1
        thread = threading.Thread(
            target=self._write, args=(opened, name, files, recording_fd), name="crash-report", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()
        return {"report": str(opened.folder / name)}

    def _open(self) -> OpenFolder:
        """The folder of reports. Recordings and log lines may have text of requests, so only this user may read them,
        and no other one chooses where they are. Raises OSError and RuntimeError."""

        def default_root() -> Path:
            return cache_path(Settings()).expanduser().absolute()

        root = cache_path(self.settings).expanduser().absolute()
        opened = OpenFolder(own_folder(root, CRASHES, default_root, "crash reports", self._log.warning))
        try:
            opened.close_to_others()  # whatever is there by now
        except OSError:
            opened.close()
            raise
        return opened

    def _write(self, opened: OpenFolder, name: str, files: dict[str, bytes], recording_fd: int) -> None:
        """Fill the partial report, then remove the oldest. Runs in a thread; owns the descriptors."""
        folder = opened.path
        partial = folder / f"{PARTIAL}{name}"
        try:
            with self._lock:
                for file_name, data in files.items():
                    if data:
                        with os.fdopen(create_private(partial / file_name), "wb") as file:
                            file.write(data)
                if recording_fd >= 0:
                    _copy(recording_fd, partial / "recording")
                partial.rename(folder / name)
                _remove_oldest(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            self._failed(error)
        finally:
            opened.close()
            if recording_fd >= 0:
                os.close(recording_fd)

    def _failed(self, error: OSError | RuntimeError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._log.warning("crash reports can't be written", extra={"fields": {"why": str(error)}})

    def close(self) -> None:
        """Wait until the reports are written."""
        end_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))


def reports_in(folder: Path) -> list[Path]:
    """The reports in a folder `crashes`, the newest first, with those that are incomplete."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name.removeprefix(PARTIAL), reverse=True)


def _remove_oldest(folder: Path) -> None:
    of_server: Counter[str] = Counter()
    num_kept = 0
    for index, path in enumerate(reports_in(folder)):
        _, _, rest = path.name.removeprefix(PARTIAL).partition("-")
        server = rest.partition("-")[0]
        of_server[server] += 1
        if index < MAX_REPORTS or (of_server[server] <= MAX_OF_SERVER and num_kept < MAX_REPORTS_WITH_THOSE):
            num_kept += 1
        else:
            shutil.rmtree(path, ignore_errors=True)


def _copy(fd: int, path: Path) -> None:
    """Copy a file, whose position other processes share, from its beginning. An empty one is left out."""
    num_bytes = os.fstat(fd).st_size
    if not num_bytes:
        return
    with os.fdopen(create_private(path), "wb") as file:
        offset = 0
        while offset < num_bytes and (copied := os.sendfile(file.fileno(), fd, offset, num_bytes - offset)):
            offset += copied


def _report(
    child: Child, reason: str, now: datetime, box: m.BlackBox, settings: Settings, rss: int | None
) -> CrashReport:
    code = child.exit_code
    suspect = black_box.suspect_of(box)
    return CrashReport(
        stage=child.name,
        pid=child.pid,
        incarnation=child.incarnation,
        version=VERSION,
        died_at=now.isoformat(timespec="milliseconds"),
        uptime_s=round(time.monotonic() - child.started_s, 3),
        reason=reason,
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 else None,
        rss_bytes=rss,
        request_id=None if suspect is None else f"{suspect.request_id:x}",
        attempt=None if suspect is None else suspect.attempt,
        settings=changed_settings(settings),
    )


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The settings that differ from the default, by dotted key."""
    return dict(_changed(msgspec.to_builtins(settings), msgspec.to_builtins(Settings()), ""))


def _changed(tree: dict[str, Any], default: dict[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(default.get(key), dict):
            yield from _changed(value, default[key], f"{prefix}{key}.")
        elif value != default.get(key):
            yield f"{prefix}{key}", value
