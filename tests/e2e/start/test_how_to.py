"""docs/how-to.md: its commands work as written, on a server with the default model."""

import ast
import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from pipeline import __main__ as cli
from pipeline.config.load import load
from tests.e2e.server import Server

TEXT = (Path(__file__).parents[3] / "docs" / "how-to.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.+?)\n```", TEXT, re.DOTALL)
COMMANDS = [
    command
    for language, block in BLOCKS
    if language == "sh"
    for command in re.findall(r"^(?:curl|pipeline) (?:'[^']*'|[^'\n])*", block, re.MULTILINE)
]
STARTS = ("pipeline serve",)
CHANGES = ("pipeline reload", "pipeline restart")
"""What replaces processes or settings of a running server: not for the one that other tests use too."""
FETCHES = ("pipeline pull", "pipeline chat")
"""What gets a model from a hub."""
LOOKS = [one for one in COMMANDS if not one.startswith((*STARTS, *CHANGES, *FETCHES))]
OF_A_SERVER = ("ps", "top", "bench", "usage")
SHORTER = {"bench": " --output-tokens 16"}
"""Options with which a command takes less time, but does the same."""


@pytest.mark.parametrize("command", LOOKS, ids=[" ".join(one.split()[:4])[:40] for one in LOOKS])
def test_a_command_works_as_written(server: Server, tmp_path: Path, command: str) -> None:
    port = server.url.rpartition(":")[2]
    command = command.partition("  #")[0].replace("http://127.0.0.1:8000", server.url)
    if command.startswith("pipeline "):
        name = command.split()[1]
        command = f"{sys.executable} -m {command}" + (f" --port {port}" if name in OF_A_SERVER else "")
        command += SHORTER.get(name, "")
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if command.startswith("curl") and "/metrics" not in command:
        answer = json.loads(done.stdout)
        assert "error" not in answer, answer
        if "tool_choice" in command:
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
        if "json_schema" in command:
            assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"city", "country"}


def test_clients_need_only_their_variables(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the page, and no arguments that say where the server is."""
    exported = {
        name: value.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        for language, block in BLOCKS
        if language == "console"
        for line in re.findall(r"^\$ export (.+)", block, re.MULTILINE)
        for name, value in re.findall(r"(\w+)=(\S+)", line)
    }
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    asked: Any = [{"role": "user", "content": "What is the capital of Greece?"}]
    with openai.OpenAI() as one, anthropic.Anthropic() as two, ollama.Client() as three:
        (model,) = (found.id for found in one.models.list())
        chat = one.chat.completions.create(model=model, messages=asked, temperature=0)
        message: Any = two.messages.create(model=model, messages=asked, max_tokens=16, extra_body={"temperature": 0})
        reply = three.chat(model=model, messages=asked, options={"temperature": 0})
    said = [chat.choices[0].message.content, message.content[0].text, reply.message.content]
    assert said == ["The capital of Greece is Athens."] * 3


def test_settings_and_processes_change_and_the_server_stops_while_a_request_runs() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    limits = ("supervisor.drain_timeout_s=120", "supervisor.hang_timeout_s=120", "gateway.late_stage_timeout_s=120")
    with Server(*limits) as server, ThreadPoolExecutor() as pool:
        port = server.url.rpartition(":")[2]

        def run(command: str, *more: str, code: int = 0) -> str:
            words = [sys.executable, "-m", *command.split(), "--port", port, *more]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
            assert done.returncode == code, "\n".join([done.stderr, *server.lines])
            return done.stderr

        for command in [one for one in COMMANDS if one.startswith(CHANGES)]:
            run(command)
        server.look()
        execute = server.stage("execute")
        execute.suspend()  # so that the reply can't end before the commands
        reply = pool.submit(post, server, body)
        server.until(lambda health: health["running"] > 0)
        run("pipeline stop", "--timeout", "0.1", code=1)
        again = run("pipeline stop", "--timeout", "0.1", code=1)
        assert "is stopping already; requests in flight may end first" in again
        execute.resume()
        assert reply.result(60)["usage"]["completion_tokens"] == 100
        assert server.process.wait(10) == 0


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_the_page_has_commands_of_each_kind() -> None:
    assert len([one for one in LOOKS if one.startswith("curl")]) >= 6
    assert len([one for one in COMMANDS if one.startswith(STARTS)]) >= 10
    assert len(LOOKS) >= 12


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith((*STARTS, *CHANGES, *FETCHES))])
def test_settings_and_options_of_a_command_are_valid(command: str) -> None:
    args = cli._parser().parse_args(command.partition("  #")[0].replace("'", "").split()[1:])
    if command.startswith("pipeline serve"):
        load(args.config, args.set or [])


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith(FETCHES)])
def test_a_command_names_a_model_of_a_hub(tmp_path: Path, command: str) -> None:
    """It is looked for in a cache that has none, without a network."""
    done = subprocess.run(
        [sys.executable, "-m", *command.partition("  #")[0].split(), "--offline"],
        env=os.environ | {"HF_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and re.search(rf"[\w-]+/[\w.:-]+ is not in {tmp_path}", done.stderr), done.stderr


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "python"])
def test_python_is_valid(block: str) -> None:
    ast.parse(block)
