"""A server of several models is replaced by another one at its address, and other commands say that they can't."""

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from pipeline import Client, SamplingParams
from tests.e2e.server import Server
from tests.e2e.several.asking import GREEDY, ask, states
from tests.e2e.several.conftest import config


def pipeline(server: Server, *command: str) -> "subprocess.CompletedProcess[str]":
    port = server.url.rpartition(":")[2]
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *command, "--port", port], capture_output=True, text=True, timeout=120
    )


def stream(server: Server, model: str) -> str:
    """The text of a reply."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 60, "stream": True} | GREEDY
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=100) as response:
        for line in response:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def test_streams_of_all_models_go_on_and_one_gets_other_settings(folders: Path) -> None:
    with Server(config=config(folders, "restart")) as server:
        expected = stream(server, "chat")
        done: list[subprocess.CompletedProcess[str]] = []
        option = 'models.other.aliases=["new-name"]'
        restarting = threading.Thread(target=lambda: done.append(pipeline(server, "restart", "--set", option)))
        restarting.start()
        while not done:
            for model in ("chat", "other"):
                assert stream(server, model) == expected
        restarting.join()
        assert done[0].returncode == 0, done[0].stderr
        assert states(server) == {"chat": "loaded", "other": "loaded", "vectors": "loaded"}
        assert stream(server, "new-name") == expected
        with Client(server.zmq) as client:
            (*_, last) = client.generate("Hello", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert last.finish_reason == "length"
        server.look()


def test_a_reload_says_that_it_is_for_one_model(folders: Path) -> None:
    with Server(config=config(folders, "reload")) as server:
        done = pipeline(server, "reload", "--model", "chat", "--set", "log_level=debug")
        assert done.returncode == 1 and "pipeline restart --set models.NAME.KEY=VALUE" in done.stderr
        given = pipeline(server, "reload", "--model", "chat", "--config", "default")
        assert given.returncode == 1 and "can't be reloaded" in given.stderr
        assert ask(server, "/health")["status"] == "ok"
