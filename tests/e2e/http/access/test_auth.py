"""A server with API keys: which requests it accepts, that the keys do not leak, and where it listens without keys."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from pipeline import Client, RequestError
from pipeline.__main__ import main
from pipeline.replay import format as f
from tests.e2e.server import Server
from tests.stages.gateway.http.access.test_guard import free_port

KEY = "sk-of-the-environment-4f1c0e6d"
FILE_KEY = "sk-of-the-file-9a8b7c6d5e4f"


def get(url: str, key: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Locked:
    """A server with keys: two gateways, an admin listener and a tcp address. Its first gateway is recorded."""

    def __init__(self, folder: Path) -> None:
        self.keys_file = folder / "keys"
        self.keys_file.write_text(f"# a comment\n{FILE_KEY}\n")
        self.keys_file.chmod(0o600)
        self.recording = folder / "gateway.rec"
        self.zmq_address = f"tcp://127.0.0.1:{free_port(2)}"
        self.server = Server(
            f"gateway.api_keys_file={self.keys_file}",
            "gateway.replicas=2",
            "gateway.admin_port=0",
            f"gateway.zmq={self.zmq_address}",
            "log_level=debug",
            options=("--instant", "--record", f"gateway.0={self.recording}"),
            environ={"PIPELINE_API_KEYS": KEY},
        )
        match = re.search(r"admin=(http://\S+)", self.server.wait_for_line("ready on", 1))
        assert match
        self.admin = match[1]


@pytest.fixture(scope="module")
def locked(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    locked = Locked(tmp_path_factory.mktemp("locked"))
    with locked.server:
        yield locked


def test_openai_s_client_is_accepted_only_with_a_key(locked: Locked) -> None:
    url = f"{locked.server.url}/v1"
    for key in (KEY, FILE_KEY):
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            model = client.models.list().data[0].id
            reply = client.completions.create(model=model, prompt="Hi", max_tokens=3)
            assert reply.usage is not None and reply.usage.completion_tokens == 3
    with (
        openai.OpenAI(base_url=url, api_key=f"{KEY}x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refusal,
    ):
        client.models.list()
    assert (refusal.value.code, KEY in str(refusal.value)) == ("invalid_api_key", False)


def test_no_process_of_a_server_with_keys_leaves_a_core_dump(locked: Locked) -> None:
    supervisor = psutil.Process(locked.server.process.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    assert len(processes) > 5
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        (line,) = (line for line in (folder / "limits").read_text().splitlines() if "core file size" in line)
        assert int(line.split()[4]) <= 1, process.name()
        assert int((folder / "coredump_filter").read_text(), 16) == 0, process.name()
        assert folder.stat().st_uid == os.geteuid(), "its user can still inspect it"


def test_python_clients_over_tcp_send_their_key(locked: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_API_KEY", raising=False)
    for wrong in (None, "not-a-key"):
        with pytest.raises(RequestError) as refusal:
            Client(locked.zmq_address, api_key=wrong)
        assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    with Client(locked.zmq_address, api_key=FILE_KEY) as client:
        assert client.info.vocab_size > 0
    monkeypatch.setenv("PIPELINE_API_KEY", KEY)
    with Client(locked.zmq_address) as client:
        assert client.info.vocab_size > 0


def test_commands_use_the_key_of_the_environment(locked: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_API_KEY", KEY)
    bench = [sys.executable, "-m", "pipeline", "bench", "--url", locked.server.url, "--num-requests", "2"]
    bench += ["--concurrency", "1", "--prompt-words", "2", "--output-tokens", "2", "--warmup", "0"]
    done = subprocess.run(bench, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    chat = [sys.executable, "-m", "pipeline", "chat", "--url", locked.server.url, "--max-tokens", "2"]
    done = subprocess.run(chat, input="Hi\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    monkeypatch.delenv("PIPELINE_API_KEY")
    done = subprocess.run(chat, input="Hi\n", capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "API key" in done.stderr
    assert KEY not in done.stderr


def test_the_admin_listener_answers_for_the_whole_server(locked: Locked) -> None:
    status, text = get(f"{locked.admin}/health")
    health = json.loads(text)
    assert (status, health["status"], len(health["stages"])) == (200, "ok", 6)
    assert get(f"{locked.admin}/metrics")[0] == 200
    assert [get(f"{locked.admin}{path}", KEY)[0] for path in ("/v1/models", "/load")] == [404, 404]
    assert [get(f"{locked.server.url}{path}", KEY)[0] for path in ("/health", "/metrics", "/load")] == [404, 404, 200]
    assert get(f"{locked.server.url}/health")[0] == 401


def test_keys_are_read_again_and_what_they_use_is_counted(locked: Locked, capsys: pytest.CaptureFixture[str]) -> None:
    def command(name: str, *options: str) -> tuple[int, str]:
        code = main([name, "--pid", str(locked.server.process.pid), *options])
        out, err = capsys.readouterr()
        return code, out or err

    def usage() -> dict[str, int]:
        code, out = command("usage", "--json")
        assert code == 0
        return {one["name"]: one["requests"] for one in json.loads(out)["keys"]}

    before, kept = usage(), locked.keys_file.read_text()
    tokenize = urllib.request.Request(
        f"{locked.server.url}/tokenize",
        b'{"prompt": "Hi"}',
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(tokenize, timeout=30) as response:
        assert response.status == 200
    assert usage() == before | {"key-2": before["key-2"] + 1}
    try:
        locked.keys_file.write_text("two words")
        code, text = command("reload")
        assert code == 1 and "line 1: a key must have 1 to 512" in text
        assert get(f"{locked.server.url}/v1/models", FILE_KEY)[0] == 200, "the keys stay"
        locked.keys_file.write_text("sk-another-of-the-file-1234")
        assert command("reload") == (0, "API keys: added key-3; removed key-1: used at once\n")
        models = f"{locked.server.url}/v1/models"
        # Each on a connection of its own, which either gateway may get.
        assert {get(models, "sk-another-of-the-file-1234")[0] for _ in range(8)} == {200}
        assert {get(models, FILE_KEY)[0] for _ in range(8)} == {401}
        assert get(models, KEY)[0] == 200, "that of the environment is no more read, and stays"
    finally:
        locked.keys_file.write_text(kept)
    assert command("reload") == (0, "API keys: added key-1; removed key-3: used at once\n")
    metrics = get(f"{locked.admin}/metrics")[1]
    assert 'pipeline_key_requests_total{key="key-1"}' in metrics and FILE_KEY not in metrics


def texts_about(server: Server) -> dict[str, bytes]:
    """What the system shows of each stage's process."""
    found = {}
    server.look()
    for pid in server.seen:
        for name in ("cmdline", "environ"):
            found[f"{pid} {name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
    found["supervisor cmdline"] = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    return found


def test_the_keys_are_not_readable_anywhere(locked: Locked) -> None:
    """A key in any of these would leak in a bug report."""
    found = texts_about(locked.server)
    assert len(found) >= 13
    health = get(f"{locked.admin}/health")[1] + get(f"{locked.admin}/metrics")[1]
    get(f"{locked.server.url}/nothing?key={KEY}", KEY)
    get(f"{locked.server.url}/v1/models", f"{KEY}x")
    show = [sys.executable, "-m", "pipeline", "config", "show", "--set", f"gateway.api_keys_file={locked.keys_file}"]
    shown = subprocess.run(show, capture_output=True, text=True, timeout=60, check=True).stdout
    assert str(locked.keys_file) in shown
    found |= {"health": health.encode(), "config": shown.encode(), "log": locked.server.log().encode()}
    for what, data in found.items():
        assert KEY.encode() not in data and FILE_KEY.encode() not in data, what


def rejected(*sets: str, environ: dict[str, str] | None = None) -> str:
    """The error of a server that does not start. It is reported before any slow work."""
    with Server(*sets, until_ready=False, options=("--instant",), environ=environ) as server:
        assert server.process.wait(30) == 2, server.log()
        server.wait_for_line("<end of log>", 10)
        return server.log()


def test_it_does_not_listen_beyond_this_machine_without_keys(tmp_path: Path) -> None:
    for where in ("0.0.0.0", "::"):
        log = rejected(f"gateway.host={where}")
        assert "pipeline: error: gateway.host: " in log and "api_keys_file" in log and "allow_unauthenticated" in log
    assert "gateway.zmq: tcp://*:9999 can be reached" in rejected("gateway.zmq=tcp://*:9999")
    assert "PIPELINE_API_KEYS: contains no key" in rejected(environ={"PIPELINE_API_KEYS": " "})
    assert "can't be read" in rejected(f"gateway.api_keys_file={tmp_path / 'none'}")


def test_it_listens_beyond_this_machine_with_keys_or_allow_unauthenticated(smollm2_dir: Path) -> None:
    here: dict[str, Any]
    for sets, here, status in (
        (("gateway.allow_unauthenticated=true",), {}, 200),
        ((), {"PIPELINE_API_KEYS": KEY}, 401),
    ):
        with Server("gateway.host=0.0.0.0", *sets, options=("--instant",), environ=here) as server:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            assert get(f"{url}/v1/models")[0] == status
            assert [get(f"{url}{path}")[0] for path in ("/health", "/metrics")] == [200, 200]


def test_the_keys_are_in_no_recording(locked: Locked) -> None:
    """Runs last with this server: a recording is complete when its stage has ended."""
    assert get(f"{locked.server.url}/v1/models", KEY)[0] == 200
    assert locked.server.stop(signal.SIGTERM) == 0
    data = locked.recording.read_bytes()
    assert data.startswith(f.MAGIC)
    assert KEY.encode() not in data and FILE_KEY.encode() not in data
