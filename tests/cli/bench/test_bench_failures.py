"""`pipeline bench` against servers that refuse, break off or answer something else, and interrupts: one line says why,
and what was measured is kept."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.cli.bench.client import NOT_AN_API, message_of
from tests.cli.bench.runs import bench
from tests.cli.fake_server import FakeServer


def test_a_missing_api_key_is_an_error_that_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_API_KEY", raising=False)
    with FakeServer(api_key="sk-1") as server:
        short = ("--num-requests=1", "--concurrency=1", "--temperature=0", "--output-tokens=1", "--prompt-words=3")
        port = server.url.rpartition(":")[2]
        assert main(["bench", "--port", port, *short]) == 1
        assert capsys.readouterr().err == (
            f"pipeline bench: error: {server.url}/v1/models answered 401: Invalid API key; give the server's API key "
            "with --api-key, or set PIPELINE_API_KEY\n"
        )
        assert main(["bench", "--port", port, "--api-key=sk-1", *short]) == 0


def test_a_server_that_refuses_the_first_requests_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda body, number: "bad") as server:
        short = ("--num-requests=9", "--concurrency=1,4", "--output-tokens=1", "--prompt-words=3")
        assert main(["bench", "--url", server.url, *short]) == 1
        assert len(server.bodies) == 1, "no level but the first, and no request after the warm-up"
        out, err = capsys.readouterr()
        expected = f"{server.url}/v1/chat/completions answered 400: the prompt is too long"
        assert (out, err) == ("", f"pipeline bench: error: {expected}\n")


@pytest.mark.parametrize(("fault", "message"), [("cut", "the stream ended early"), ("error", "a stage died")])
def test_broken_streams_are_counted_and_cause_an_error_exit(
    fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(lambda body, number: fault if body.get("stream") and number % 3 == 0 else None) as server:
        code, report, err = bench(
            server, capsys, "--concurrency=1", "--num-requests=6", "--prompt-words=5", "--warmup=0", "--output-tokens=3"
        )
    (level,) = report["levels"]
    assert code == 1
    assert (level["num_requests"], level["num_errors"], level["errors"]) == (4, 2, {message: 2})
    assert err == f"pipeline bench: error: 1 streams, temperature 0: 2 × {message}\n"


@pytest.mark.parametrize("num_cut", [1, 2])
def test_a_request_on_a_closed_connection_is_sent_again_once(num_cut: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third request is cut off before its answer, once or twice in a row."""
    with FakeServer(lambda body, number: "drop" if number % 3 < num_cut else None) as server:
        code, report, err = bench(
            server, capsys, "--concurrency=1", "--num-requests=2", "--prompt-words=5", "--warmup=0", "--output-tokens=3"
        )
    (level,) = report["levels"]
    assert level["num_errors"] == num_cut - 1, err
    assert (code, level["num_requests"]) == (num_cut - 1, 3 - num_cut)
    if num_cut == 1:
        assert [len(server.bodies), server.bodies[0]] == [3, server.bodies[1]]


def test_a_server_that_rejects_everything_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda body, number: "refuse") as server:
        code, report, _ = bench(server, capsys, "--concurrency=2", "--duration=10m", "--prompt-words=5")
    assert code == 1
    assert report["levels"][0]["errors"] == {"503: busy": len(server.bodies)}
    assert len(server.bodies) <= 12


def test_a_missing_server_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        pass
    assert main(["bench", "--url", server.url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pipeline bench: error: no server at {server.url} (Connection refused); start one with")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "models", [[], None, {"data": None}, {"data": []}, {"data": {"a": 1}}, {"data": ["a"]}, {"data": [{"name": "a"}]}]
)
def test_an_unexpected_model_list_is_an_error_of_one_line(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        server.models = models
        assert main(["bench", "--url", server.url]) == 1
    message = f"{server.url}/v1/models lists no model; name one with --model"
    assert capsys.readouterr() == ("", f"pipeline bench: error: {message}\n")


@pytest.mark.parametrize("usage", ["many", ["x"], {"prompt_tokens": "x"}, {"prompt_tokens": -1}, {"tokens": 3}])
def test_an_unexpected_usage_is_an_error_of_one_line(usage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        server.usage = usage
        assert main(["bench", "--url", server.url]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "reports no usage" in err


@pytest.mark.parametrize("name", [".", "no/such/folder.json", "x" * 300, "a\0b"])
def test_an_unwritable_report_is_an_error_before_measuring(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        assert main(["bench", "--url", server.url, "--json", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), server.bodies) == ("", 1, [])
    assert err.startswith(f"pipeline: error: --json {tmp_path}")
    assert "can't be written: " in err


def test_a_failed_measurement_leaves_no_report_and_keeps_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        pass
    old = tmp_path / "old.json"
    old.write_text("{}")
    for path in (tmp_path / "new.json", old):
        assert main(["bench", "--url", server.url, "--json", str(path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "{}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE HTML>\n<html>\n<h1>Error response</h1>", NOT_AN_API),
        (b"404:\n  Not   Found\n", "404: Not Found"),
        (b"", "no words"),
        (b'{"error": {"message": "no such model"}}', "no such model"),
    ],
)
def test_the_answer_of_another_program_is_one_line(body: bytes, words: str) -> None:
    assert message_of(body) == words


def test_an_interrupt_keeps_the_levels_that_were_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"

    def interrupt(body: dict[str, Any], number: int) -> str | None:
        if number == 4:  # of the second level; the first one and its warm-up are four
            os.kill(os.getpid(), signal.SIGINT)
        return None

    with FakeServer(interrupt) as server:
        options = (
            "--concurrency=1,2,3",
            "--num-requests=3",
            "--temperature=0",
            "--output-tokens=2",
            "--prompt-words=3",
        )
        assert main(["bench", "--url", server.url, "--json", str(path), *options]) == 130
    out, err = capsys.readouterr()
    assert err == "pipeline bench: warning: 1 of 3 levels were measured; this is their report\n"
    assert "output tok/s" in out
    report = json.loads(path.read_text())
    assert ([level["concurrency"] for level in report["levels"]], report["is_complete"]) == ([1], False)


def test_an_interrupt_before_the_first_level_ends_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(body: dict[str, Any], number: int) -> str | None:
        os.kill(os.getpid(), signal.SIGINT)
        return None

    with FakeServer(interrupt) as server:
        options = ("--concurrency=1", "--num-requests=3", "--temperature=0", "--output-tokens=2", "--prompt-words=3")
        assert main(["bench", "--url", server.url, *options]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_server_that_refuses_a_later_level_leaves_the_earlier_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda body, number: "bad" if number >= 4 else None) as server:
        options = ("--concurrency=1,2", "--num-requests=3", "--output-tokens=2", "--prompt-words=3")
        code, report, err = bench(server, capsys, *options)
    assert (code, [level["concurrency"] for level in report["levels"]], report["is_complete"]) == (1, [1], False)
    assert [line.split(": ")[1] for line in err.splitlines()] == ["error", "warning"]
