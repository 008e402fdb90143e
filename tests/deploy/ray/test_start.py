"""What `pipeline deploy` prints while replicas start, and why it stops."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.deploy.ray import start as ray_start
from pipeline.deploy.ray.start import reason, until_running
from pipeline.errors import UserError

FAILED = """The deployment failed to start 2 times in a row. Error:
ray::ServeReplica:pipeline:Server.initialize_and_get_metadata() (pid=1)
  File "replicas.py", line 60, in __init__
RuntimeError: the server of replica ab could not start: execute: there is no GPU"""
WHY = "the server of replica ab could not start: execute: there is no GPU"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "LOOK_S", 0.001)


def status(name: str, num: int = 0, message: str = "") -> Any:
    server = SimpleNamespace(replica_states={"RUNNING": num, "STARTING": 2 - num}, message=message)
    return SimpleNamespace(status=SimpleNamespace(value=name), message="", deployments={"Server": server})


def run(found: Iterator[Any], timeout_s: float = 30.0, stop: threading.Event | None = None) -> bool:
    return until_running(lambda: next(found), "Server", 2, timeout_s, stop or threading.Event())


def test_progress_is_shown_once_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    found = [None, *[status("DEPLOYING")] * 3, *[status("DEPLOYING", 1)] * 3, status("RUNNING", 2)]
    assert run(iter(found))
    assert capsys.readouterr().err.splitlines() == ["starting 2 replicas …", "1 of 2 replicas ready (0 s)"]


def test_a_long_start_is_not_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "SAY_S", -1.0)
    assert run(iter([status("DEPLOYING"), status("RUNNING", 2)]))
    assert capsys.readouterr().err.splitlines()[1] == "0 of 2 replicas ready (0 s)"


def test_a_failed_start_names_the_replica_s_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = iter([status("DEPLOYING", 0, FAILED), status("DEPLOY_FAILED", 0, FAILED)])
    with pytest.raises(UserError, match=f"^replicas could not start: {WHY}$"):
        run(found)
    assert f"0 of 2 replicas ready; {WHY} (0 s)" in capsys.readouterr().err


def test_a_timeout_says_what_is_missing() -> None:
    def forever(message: str) -> Iterator[Any]:
        while True:
            yield status("DEPLOYING", 1, message)

    with pytest.raises(UserError, match=r"^1 of 2 replicas were ready after 0\.01 s; `ray status` says"):
        run(forever(""), 0.01)
    with pytest.raises(UserError, match=rf"^1 of 2 replicas were ready after 0\.01 s: {WHY}$"):
        run(forever(FAILED), 0.01)


def test_a_signal_ends_the_wait() -> None:
    stop = threading.Event()

    def found() -> Iterator[Any]:
        yield status("DEPLOYING")
        stop.set()
        yield status("DEPLOYING")

    assert not run(found(), stop=stop)


def test_the_reason_is_the_last_error() -> None:
    assert reason(FAILED) == WHY
    assert reason("Waiting for 2 replicas to be created.") == ""
