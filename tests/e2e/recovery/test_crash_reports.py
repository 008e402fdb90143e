"""Stages die in a running server: each death leaves a report, and a request that keeps killing a stage is refused."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.__main__ import main
from pipeline.runtime.files.cache_path import CRASHES
from pipeline.runtime.messages import BlackBox
from pipeline.runtime.process import black_box
from pipeline.supervisor.crashes.crash_counts import MAX_CRASHES
from pipeline.supervisor.crashes.crash_reports import reports_in
from tests.compiled import link_kernels
from tests.e2e.server import Server

PATIENCE_S = 60.0
LONG = "a long story of the sea. " * 120_000
"""Takes seconds to encode."""


@pytest.fixture(scope="module")
def cache(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own, for the reports, with the models of the usual one."""
    folder = link_kernels(tmp_path_factory.mktemp("cache"))
    for entry in smollm2_dir.parent.iterdir():
        if entry.name != CRASHES and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    sets = ("supervisor.crash_reports=true", f"cache_dir={cache}", "log_level=debug", "supervisor.max_restarts=1000")
    with Server(*sets) as server:
        yield server


def complete(server: Server, prompt: str, max_tokens: int = 4) -> tuple[int, Any]:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "truncate_prompt_tokens": 16}
    body = json.dumps(fields).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pid_of(server: Server, stage: str) -> int:
    (found,) = [one["pid"] for one in server.health()["stages"] if one["name"] == f"{stage}.0"]
    return int(found)


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.005)
    return found


def kill(server: Server, stage: str, number: int = signal.SIGKILL) -> Path:
    """Kill a stage, and wait until it is back. Returns its report."""
    pid = pid_of(server, stage)
    psutil.Process(pid).send_signal(number)
    server.until(lambda health: health["status"] == "ok" and pid_of(server, stage) != pid)
    server.look()
    (line,) = [line for line in server.lines if f"{stage}.0 died" in line and f"-{stage}.0-" in line][-1:]
    report = Path(line.rpartition("report=")[2])
    until(report.is_dir, "report")
    assert json.loads((report / "report.json").read_bytes())["pid"] == pid
    return report


def test_a_stage_that_is_killed_leaves_its_last_lines_and_a_recording(
    server: Server, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("walrus", "lighthouse"):
        assert complete(server, word)[0] == 200
        report = kill(server, "detokenize")
        assert report.parent == cache / CRASHES
        assert "detokenize.0 ended" in (report / "log.txt").read_text()
        recording = report / "recording"
        assert main(["replay", "detokenize", str(recording), "--out", str(tmp_path / word)]) == 0
        assert "recorded from its start" in capsys.readouterr().out
        assert word.encode() not in recording.read_bytes(), "detokenize receives ids"
    assert complete(server, "three")[0] == 200


def test_a_stage_that_crashes_leaves_the_stacks_of_its_threads(server: Server) -> None:
    report = kill(server, "execute", signal.SIGSEGV)
    stacks = (report / "stacks.txt").read_text()
    assert stacks.startswith("Fatal Python error: Segmentation fault")
    assert "stages/execute/stage.py" in stacks and "Current thread" in stacks
    assert "stacks of execute.0:\n    Fatal Python error: Segmentation fault" in server.log()
    assert json.loads((report / "report.json").read_bytes())["signal"] == "SIGSEGV"
    assert complete(server, "still here")[0] == 200


def suspect_in(pid: int) -> black_box.Suspect | None:
    """The request that a process is working on, by its black box."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "black-box" in str(entry.readlink()):
                fd = os.open(entry, os.O_RDONLY)
                break
        except FileNotFoundError:
            continue
    else:
        return None  # it has not started
    try:
        return black_box.suspect_of(BlackBox(-1, fd))
    finally:
        os.close(fd)


def test_a_request_that_kills_ingest_three_times_gets_500_and_its_neighbours_their_replies(
    server: Server, cache: Path
) -> None:
    before = len(reports_in(cache / CRASHES))
    expected = [complete(server, text, 100) for text in ("first", "second")]
    with ThreadPoolExecutor(3) as clients:
        neighbours = [clients.submit(complete, server, text, 100) for text in ("first", "second")]
        server.until(lambda health: health["running"] == 2)
        poison = clients.submit(complete, server, LONG)
        suspects = []
        for _ in range(MAX_CRASHES):
            pid = pid_of(server, "ingest")
            suspects.append(until(lambda pid=pid: suspect_in(pid), "work on the request"))  # type: ignore[misc]
            psutil.Process(pid).kill()
            server.until(lambda health, pid=pid: pid_of(server, "ingest") not in (pid, 0))  # type: ignore[misc]
        status, reply = poison.result()
        assert (status, reply["error"]["code"]) == (500, "stage_died")
        assert reply["error"]["message"] == "ingest died 3 times while it worked on this request"
        assert [one.request_id for one in suspects] == [suspects[0].request_id] * MAX_CRASHES
        assert [one.attempt for one in suspects] == [1, 2, 3]
        for neighbour, (_, whole) in zip(neighbours, expected, strict=True):
            status, received = neighbour.result()
            assert (status, received["choices"]) == (200, whole["choices"])
    server.until_idle()
    server.look()
    reports = until(lambda: len(found := reports_in(cache / CRASHES)) == before + MAX_CRASHES and found, "reports")
    for report in reports[:MAX_CRASHES]:
        contents = json.loads((report / "report.json").read_bytes())
        assert contents["request_id"] == f"{suspects[0].request_id:x}"
    assert complete(server, "still here")[0] == 200
