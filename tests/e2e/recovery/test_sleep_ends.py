"""A sleeping server ends, or can't wake: its open streams end well, or with the reason."""

import json
import re
import shutil
import signal
import subprocess
import sys
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.e2e.recovery.test_recovery import kill, pids
from tests.e2e.recovery.test_sleep import call, recomputed, sleep, streamed, wake_up
from tests.e2e.recovery.test_swap import complete, sets
from tests.e2e.server import Server

RULES = ("execute.kv_cache_bytes=1MiB", "gateway.enable_sleep_mode=true", "supervisor.drain_timeout_s=600")
PROMPT = [5, 6, 7]


def server_of(tiny_model: Path, *rules: str) -> Server:
    return Server(*sets(tiny_model, "0"), *RULES, *rules)


def events_of(lines: list[bytes]) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def text_of(lines: list[bytes]) -> str:
    return "".join(event["choices"][0]["text"] for event in events_of(lines))  # type: ignore[index]


def asleep_with_a_stream(server: Server) -> tuple[HTTPResponse, list[bytes]]:
    """A stream that has begun, and its lines so far; the server sleeps."""
    response = streamed(server)
    lines = [response.readline()]
    sleep(server)
    return response, lines


@pytest.mark.parametrize("way", ["SIGTERM", "pipeline stop"])
def test_a_server_that_ends_wakes_and_finishes_its_streams(tiny_model: Path, way: str) -> None:
    with server_of(tiny_model) as server:
        expected = complete(server, PROMPT, 200)["choices"][0]["text"]
        response, lines = asleep_with_a_stream(server)
        with response:
            if way == "SIGTERM":
                server.process.send_signal(signal.SIGTERM)
            else:
                stopping = [sys.executable, "-m", "pipeline", "stop", "--pid", str(server.process.pid)]
                subprocess.run(stopping, check=True, capture_output=True)
            lines += list(response)
        assert text_of(lines) == expected
        assert lines[-2] == b"data: [DONE]\n"
        assert server.process.wait(30) == 0
        assert "the server wakes to finish its open requests" in server.log()


def test_a_server_without_streams_ends_without_waking(tiny_model: Path) -> None:
    with server_of(tiny_model) as server:
        sleep(server)
        assert server.stop() == 0
        assert "wakes" not in server.log()
        assert "is back" not in server.log()


@pytest.fixture
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, whose file a test may take away."""
    return Path(shutil.copytree(tiny_model, tmp_path / "models" / "tiny"))


def test_streams_of_a_server_that_ends_and_cannot_wake_fail_at_once_with_the_reason(own_model: Path) -> None:
    with server_of(own_model) as server:
        response, lines = asleep_with_a_stream(server)
        (own_model / "model.safetensors").unlink()
        with response:
            server.process.send_signal(signal.SIGTERM)
            lines += list(response)
        error = events_of(lines)[-1]["error"]
        assert isinstance(error, dict)
        assert error["code"] == "stage_died"
        assert "execute.0 died" in error["message"] and "model.safetensors" in error["message"]
        assert server.process.wait(30) == 3
        assert "open requests can't be finished: execute.0 can't start" in server.log()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_server_that_cannot_wake_sleeps_on_says_why_and_wakes_when_it_can(own_model: Path, ranks: str) -> None:
    weights, away = own_model / "model.safetensors", own_model / "away"
    with server_of(own_model, f"execute.tensor_parallel={ranks}") as server:
        expected = complete(server, PROMPT, 200)["choices"][0]["text"]
        num_recomputed = recomputed(server)
        response, lines = asleep_with_a_stream(server)
        assert server.health()["reason"] is None
        weights.rename(away)
        with response:
            for _ in range(5):  # more often than an executor may fail to start
                status, body = call(server, "POST", "/wake_up")
                assert status == 409
                assert "model.safetensors" in json.loads(body)["error"]["message"]
                health = server.health()
                assert (health["status"], health["running"]) == ("sleeping", 1)
                assert re.fullmatch(r"execute\.\d can't start: .*model\.safetensors.*", health["reason"])
            assert re.search(r"the server sleeps on: execute\.\d can't start: .*model\.safetensors", server.log())
            away.rename(weights)
            wake_up(server)
            health = server.health()
            assert (health["status"], health["reason"]) == ("ok", None)
            lines += list(response)
        assert text_of(lines) == expected
        assert recomputed(server) == num_recomputed
        last = f"execute.{int(ranks) - 1}"
        kill(pids(server)[last])
        assert "SIGKILL" in server.wait_for_line(f"{last} died", 30), "the reason of a failed wake is forgotten"
        assert complete(server, PROMPT, 200)["choices"][0]["text"] == expected


def test_a_request_that_cannot_wake_the_server_waits_and_the_next_one_tries_again(own_model: Path) -> None:
    weights, away = own_model / "model.safetensors", own_model / "away"
    with server_of(own_model) as server:
        expected = complete(server, PROMPT, 200)["choices"][0]["text"]
        sleep(server, "?wake_on_request=true")
        weights.rename(away)
        with streamed(server) as first:
            server.until(lambda health: bool(health["reason"]))
            away.rename(weights)
            assert complete(server, PROMPT, 200)["choices"][0]["text"] == expected
            assert text_of(list(first)) == expected


def test_an_executor_that_wakes_takes_memory_for_the_blocks_that_it_uses(tiny_model: Path) -> None:
    def resident_bytes() -> int:
        server.look()
        return int(server.stage("execute").memory_info().rss)

    def until_touched() -> None:
        """By a thread of the lowest priority, which gets 1.5 % of a core where others compute."""
        server.until(lambda _: resident_bytes() > 192 << 20, timeout_s=120)

    with Server(*sets(tiny_model, "0"), "execute.kv_cache_bytes=192MiB", "gateway.enable_sleep_mode=true") as server:
        until_touched()
        sleep(server)
        wake_up(server)
        complete(server, PROMPT, 20)
        assert resident_bytes() < 128 << 20
        kill(pids(server)["execute.0"])
        server.until(lambda health: health["status"] == "ok")
        # One that died awake had not left a saved KV cache, so that all of it is touched.
        until_touched()
