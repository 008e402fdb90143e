"""A running server is replaced by another one at its address: `pipeline restart --new-version`, `--new-model` …"""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import AsyncClient, SamplingParams
from tests.e2e.server import Server

pytestmark = pytest.mark.usefixtures("smollm2_dir")
STORY = "Once upon a time"
LONG = {"prompt": STORY, "temperature": 0, "max_tokens": 120, "ignore_eos": True, "stream": True}


def command(server: Server, *options: str) -> list[str]:
    port = server.url.rpartition(":")[2]
    return [sys.executable, "-m", "pipeline", "restart", *options, "--port", port, "--timeout", "100"]


def restart(server: Server, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(server, *options), capture_output=True, text=True, timeout=120)


def post(server: Server, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=100)


def read(response: Any, on_first: threading.Event | None = None) -> tuple[str, str]:
    """The text and the finish_reason of a stream."""
    text = finish = ""
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text, finish = text + choice["text"], choice["finish_reason"] or finish
                if on_first is not None:
                    on_first.set()
    return text, finish


def num_servers(server: Server) -> int:
    server.look()
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum("serve" in one.cmdline() for one in server.seen.values() if one.is_running())
    return 0


def test_streams_over_zmq_and_http_go_on_and_two_replacements_leave_two_processes(tmp_path: Path) -> None:
    with Server() as server:
        with post(server, LONG) as response:
            undisturbed = read(response)

        async def stream(begun: asyncio.Event) -> str:
            async with await AsyncClient.connect(server.zmq) as client:
                params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
                text = ""
                async for output in client.generate(STORY, params):
                    text += output.text
                    begun.set()
                after = [output.text async for output in client.generate(STORY, params)]
            assert "".join(after) == text
            return text

        async def both() -> tuple[tuple[str, str], str, "subprocess.CompletedProcess[str]"]:
            begun, begun_http = asyncio.Event(), threading.Event()
            over_zmq = asyncio.create_task(stream(begun))
            with await asyncio.to_thread(post, server, LONG) as response:
                over_http = asyncio.create_task(asyncio.to_thread(read, response, begun_http))
                await begun.wait()
                await asyncio.to_thread(begun_http.wait)
                done = await asyncio.to_thread(restart, server, "--new-version")
                return await over_http, await over_zmq, done

        for _ in range(2):
            over_http, over_zmq, done = asyncio.run(both())
            assert done.returncode == 0, done.stderr
            assert over_http == undisturbed and over_zmq == undisturbed[0]
        end_s = time.monotonic() + 30
        while num_servers(server) != 1:  # the first one waits, the second one ends
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert server.stop() == 0


def test_with_other_weights_open_replies_end_with_a_sentence_and_new_ones_have_the_new_model() -> None:
    with Server() as server:
        begun = threading.Event()
        with post(server, LONG | {"max_tokens": 2000}) as response:
            results: list[tuple[str, str]] = []
            reading = threading.Thread(target=lambda: results.append(read(response, begun)))
            reading.start()
            begun.wait(60)
            closing = ["--finish", "sentence", "--closing-text", " (The model changes here.)"]
            done = restart(server, "--set", "quantization=none", "--set", "served_model_name=other", *closing)
            assert done.returncode == 0, done.stderr
            reading.join(60)
        ((text, finish),) = results
        assert finish == "length" and text.endswith(" (The model changes here.)")
        assert text.removesuffix(" (The model changes here.)").rstrip()[-1] in '.!?"\u201d'
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as response:
            assert json.load(response)["data"][0]["id"] == "other"


def test_one_at_a_time_new_connections_wait_for_the_next_server() -> None:
    with Server() as server:
        pid = server.process.pid
        begun = threading.Event()
        with post(server, LONG | {"max_tokens": 2000}) as response:
            results: list[tuple[str, str]] = []
            reading = threading.Thread(target=lambda: results.append(read(response, begun)))
            reading.start()
            begun.wait(60)
            restarting = threading.Thread(
                target=lambda: done.append(restart(server, "--new-version", "--stop-first", "--finish", "now"))
            )
            done: list[subprocess.CompletedProcess[str]] = []
            restarting.start()
            reading.join(60)
        assert results[0][1] == "length"
        with post(server, LONG | {"max_tokens": 5}) as response:  # it waits
            assert read(response)[1] == "length"
        restarting.join(100)
        assert done[0].returncode == 0, done[0].stderr
        assert server.process.pid == pid and server.process.poll() is None
        assert server.stop() == 0


def test_a_server_that_can_not_be_replaced_says_why_and_serves_on() -> None:
    with Server() as server:
        before = [one["pid"] for one in server.health()["stages"]]
        for options, problem in (
            (["--new-model", "/no/such/model"], "prepare: model '/no/such/model': no such folder or file"),
            (["--set", "schedule.max_num_seqs=no"], "schedule.max_num_seqs"),
            (["--set", "gateway.replicas=2"], "the number of listening sockets can't change from 1 to 2"),
            (["--new-version", "--closing-text", "x"], "--closing-text needs --finish"),
            (["schedule", "--new-version"], "replace the whole server"),
            (["--finish", "now"], "name a STAGE"),
        ):
            done = restart(server, *options)
            assert done.returncode == 1 and problem in done.stderr, done.stderr
        assert [one["pid"] for one in server.health()["stages"]] == before


def test_a_signal_while_streams_of_the_replaced_server_are_open_ends_both() -> None:
    with Server("supervisor.drain_timeout_s=0.5") as server:
        begun = threading.Event()
        with post(server, LONG | {"max_tokens": 7000}) as response:
            lines: list[bytes] = []

            def read_all() -> None:
                for line in response:
                    lines.append(line)
                    begun.set()

            reading = threading.Thread(target=read_all)
            reading.start()
            assert begun.wait(60)
            restarting = subprocess.Popen(
                command(server, "--new-version"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            with restarting.stdout:  # type: ignore[union-attr]
                assert restarting.stdout.readline().startswith("the next server serves")  # type: ignore[union-attr]
            with post(server, LONG) as other:  # of the next server
                read(other)
            server.look()
            assert server.stop() == 0
            reading.join(60)
            restarting.wait(60)
        assert not server.leftovers(), "one of the servers goes on"
        assert any(line.startswith(b'data: {"error"') for line in lines), "its stream has no end"
        assert "Traceback" not in server.log(), server.log()
        assert sum("draining" in line for line in server.lines) >= 3, "two of the first server, one of the next"
