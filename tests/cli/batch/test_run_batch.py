"""`pipeline run-batch` with a fake server: each line has one reply, whatever ends the run or the server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.cli.batch import runner
from pipeline.cli.batch.replies import ReplyFile
from pipeline.errors import UserError
from tests.cli.fake_server import FakeServer
from tests.rig import PATIENCE_S


def line_of(name: str, **fields: Any) -> str:
    body = {"prompt": name, "max_tokens": 1}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | fields) + "\n"


def files(folder: Path, *lines: str) -> list[str]:
    (folder / "in.jsonl").write_text("".join(lines))
    return ["run-batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]


def replies(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "a line has two replies"
    return {one["custom_id"]: one for one in found}


NAMES = [f"line-{i}" for i in range(100)]
LINES = [line_of(name) for name in NAMES]


def test_each_line_has_its_reply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main([*files(tmp_path, *LINES, "\n"), "--url", server.url, "--max-open", "7"]) == 0
        assert server.max_open <= 7 and len(server.bodies) == 100
    found = replies(tmp_path)
    assert set(found) == set(NAMES)
    one = found["line-3"]
    assert one["error"] is None and one["response"]["status_code"] == 200
    assert one["response"]["body"]["choices"] == [{"text": "word"}] and one["id"].startswith("batch_req_")
    assert capsys.readouterr().err.endswith(f"100 lines have their replies in {tmp_path / 'out.jsonl'}\n")
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600


def test_errors_are_replies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda body, _: "bad" if body["prompt"] == "line-1" else None) as server:
        command = [*files(tmp_path, *LINES[:3]), "--url", f"{server.url}/v1"]
        assert main(command) == 1
        one = replies(tmp_path)["line-1"]
        assert one["error"] == {"code": "400", "message": "the prompt is too long"}
        assert one["response"]["status_code"] == 400
        assert one["response"]["body"] == {"error": {"message": "the prompt is too long"}}
        assert capsys.readouterr().err.endswith("1 of them is an error\n")
        # Run again, it has nothing to ask.
        assert main(command) == 1
        assert len(server.bodies) == 3


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.001)
    with FakeServer(lambda _, number: ("refuse", "drop", None)[number % 3]) as server:
        assert main([*files(tmp_path, *LINES), "--url", server.url]) == 0
    assert set(replies(tmp_path)) == set(NAMES)


def test_a_server_that_stays_away_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.001)
    with FakeServer(lambda _, number: "refuse" if number >= 2 else None) as server:
        command = [*files(tmp_path, *LINES[:5]), "--url", server.url, "--timeout", "50ms", "--max-open", "1"]
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "answered 503: busy" in said and "run the command again to go on" in said
        assert set(replies(tmp_path)) == set(NAMES[:2])
    assert main([*command[:-4], "--timeout", "10ms"]) == 1  # nothing listens there
    with FakeServer() as server:
        assert main([*files(tmp_path, *LINES[:5]), "--url", server.url]) == 0
        assert len(server.bodies) == 3
    assert set(replies(tmp_path)) == set(NAMES[:5])


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Wherever it is killed, also within a line: no line is lost, or has two replies."""
    command = [sys.executable, "-m", "pipeline", *files(tmp_path, *LINES), "--max-open", "3"]

    def slow(*_: object) -> None:
        threading.Event().wait(0.01)

    with FakeServer(slow) as server:
        for num in (1, 30):
            process = subprocess.Popen([*command, "--url", server.url])
            end_s = time.monotonic() + PATIENCE_S
            while not (tmp_path / "out.jsonl").exists() or len(replies_so_far(tmp_path)) < num:
                assert time.monotonic() < end_s
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert num <= len(replies_so_far(tmp_path)) < 100
            with (tmp_path / "out.jsonl").open("a") as file:
                file.write('{"id": "batch_req_1", "custom_id": "line-99", "respo')
        assert main([*files(tmp_path, *LINES), "--url", server.url]) == 0
    assert set(replies(tmp_path)) == set(NAMES)
    asked = Counter(body["prompt"] for body in server.bodies)
    assert sum(asked.values()) <= 100 + 2 * 3  # those that were open at a kill


def replies_so_far(folder: Path) -> list[str]:
    return [line for line in (folder / "out.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}\n", "line 2: Object missing required field `custom_id`; a line is such as"),
        ("[1]\n", "line 2: Expected `object`, got `array`"),
        ("no!\n", "line 2: JSON is malformed"),
        (line_of("a"), "line 2: line 1 has the custom_id 'a', too"),
        (line_of(""), "line 2: Expected `str` of length >= 1 - at `$.custom_id`"),
        (line_of("b", method="GET"), "line 2: 'method' must be POST, not 'GET'"),
        (line_of("b", url="http://127.0.0.1/v1"), "line 2: Expected `str` matching regex"),
        (line_of("b", url="/v1/a b"), "line 2: Expected `str` matching regex"),
        (line_of("b", body=[]), "line 2: Expected `object`, got `array`"),
        (line_of("b", body={"stream": True}), "line 2: 'body.stream' must be false: each reply is written as a whole"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with FakeServer() as server:
        assert main([*files(tmp_path, line_of("a"), line), "--url", server.url]) == 1
        assert not server.bodies and not (tmp_path / "out.jsonl").exists()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"custom_id": "another"}\n', "no reply\n"])
def test_the_replies_of_another_input_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    command = files(tmp_path, *LINES[:2])
    (tmp_path / "out.jsonl").write_text(content)
    with FakeServer() as server:
        assert main([*command, "--url", server.url]) == 1
        assert not server.bodies and (tmp_path / "out.jsonl").read_text() == content
        assert "belongs to another input: line 1" in capsys.readouterr().err
        assert main([*command, "--url", server.url, "--overwrite"]) == 0
    assert set(replies(tmp_path)) == set(NAMES[:2])


def test_files_that_are_empty_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files(tmp_path), "--url", "http://127.0.0.1:1"]) == 0  # an empty file asks no server
    assert "0 lines have their replies" in capsys.readouterr().err
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "none: can't be read: No such file or directory" in capsys.readouterr().err


def test_a_model_and_an_address_are_not_given_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files(tmp_path, *LINES), "--url", "http://127.0.0.1:1", "--set", "max_model_len=9"]) == 2
    assert "--url: a model and settings are for a server that this command starts" in capsys.readouterr().err


def test_two_runs_do_not_share_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = files(tmp_path, *LINES[:2])
    with FakeServer() as server:
        with ReplyFile(tmp_path / "out.jsonl", set(NAMES), overwrite=False):
            assert main([*command, "--url", server.url]) == 1
            assert "another run-batch writes it" in capsys.readouterr().err and not server.bodies
        assert main([*command, "--url", server.url]) == 0


def test_devices_and_pipes_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(pipe := tmp_path / "pipe", 0o644)
    for path in (pipe, Path("/dev/null")):
        before = path.stat().st_mode
        assert main([*files(tmp_path, *LINES[:1])[:-1], str(path), "--url", "http://127.0.0.1:1"]) == 1
        assert "needs a file" in capsys.readouterr().err and path.stat().st_mode == before


def test_a_file_of_replies_keeps_its_mode(tmp_path: Path) -> None:
    num_before = len(list(Path("/proc/self/fd").iterdir()))
    command = files(tmp_path, *LINES[:2])
    with FakeServer() as server:
        assert main([*command, "--url", server.url]) == 0
        (tmp_path / "out.jsonl").chmod(0o644)
        assert main([*command, "--url", server.url]) == 0
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o644
    for _ in range(20):
        with pytest.raises(UserError, match="belongs to another input"):
            ReplyFile(tmp_path / "out.jsonl", set(), overwrite=False)
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_before + 5
