"""`pipeline deploy`: replicas on Ray Serve, one of which dies under streams; the same servers behind `--servers`.
test_deploy_long.py, with PIPELINE_ALL_REPLICAS=1, lets replicas die at other moments and scales them.
"""

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.compiled import link_kernels
from tests.e2e.conftest import SMALL
from tests.guardian import guard
from tests.pipes import close_at_end
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

ROOT = Path(__file__).resolve().parents[3]
START_S, PATIENCE_S = 180.0, 60.0
KEY = "the-key-of-this-deployment"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
PREFIX = "Once upon a time there was a server with several replicas. " * 4
COMPLETION = {"prompt": PREFIX, "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0, "seed": 7}
GREEDY = {"prompt": PREFIX, "max_tokens": 900, "ignore_eos": True, "temperature": 0, "logprobs": 1}
CHAT = {"messages": [{"role": "user", "content": PREFIX}], "max_tokens": 900, "ignore_eos": True, "seed": 3, "n": 2}
"""So long that all of them are open when the last has begun."""


class Deployment:
    """`pipeline deploy` in a process of its own. Use as a context manager."""

    def __init__(self, *options: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "deploy", "--port", "0", *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (environ or {}),  # Ray's workers start elsewhere
        )
        guard(self.process)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"relaying on (\S+)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> "Deployment":
        assert self._ready.wait(START_S) and self.url, "".join(self.lines)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            close_at_end(self._reader, self.process.stderr)

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get(f"{self.url}/health")["replicas"]
        return found

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> list[dict[str, Any]]:
        end_s = time.monotonic() + START_S
        while not condition(found := self.replicas()):
            assert time.monotonic() < end_s, f"timed out waiting until {what}: {found}"
            time.sleep(0.05)
        return found

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as response:
            found = re.search(rf"^{name} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])


def get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def events(
    url: str, body: dict[str, Any], path: str = "/v1/completions", at: tuple[int, Callable[[], None]] | None = None,
    headers: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The events of a stream. `at` is a number of events, and what to do when they are here."""
    request = urllib.request.Request(
        url + path, json.dumps(body | {"stream": True}).encode(), HEADERS | (headers or {})
    )
    found = []
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        for line in response:
            assert not line.startswith(b": point"), "points are for the ingress"
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            found.append(event)
            if at is not None and len(found) == at[0]:
                at[1]()
    return found


def texts_of(found: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, with its finish reason."""
    texts: dict[int, str] = {}
    for event in found:
        if event.get("type") == "content_block_delta":
            texts[0] = texts.get(0, "") + event["delta"].get("text", "")
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            ending = f"<{choice['finish_reason']}>" if choice["finish_reason"] else ""
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "") + ending
    return texts


def actor_of(url: str) -> psutil.Process:
    """The Ray actor that owns the server at this address."""
    port = int(url.rsplit(":", 1)[1])
    pids = [one.pid for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    for process in psutil.Process(next(pid for pid in pids if pid is not None)).parents():
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::"):
            return process
    raise AssertionError(f"the server at {url} belongs to no actor")


def kill_busiest(deployment: Deployment, num_open: int) -> None:
    """Kill the replica with the most streams, of which `num_open` are open. They can't end before, because the
    executors stand still."""
    executors = [
        process
        for one in deployment.replicas()
        for process in actor_of(one["url"]).children(recursive=True)
        if process.cmdline()[:1] and process.cmdline()[0].startswith("pipeline: execute")
    ]
    assert executors
    try:
        for process in executors:
            process.suspend()
        busy = max(deployment.replicas(), key=lambda one: int(one["open_requests"]))
        assert busy["open_requests"] >= num_open, "the streams are long enough"
        actor_of(busy["url"]).kill()
    finally:
        for process in executors:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def settings_for(folder: Path, model: Any = None) -> list[str]:
    """Options for replicas that serve a tiny model, which is saved in a folder, with the CPU library. `model` is a
    Llama by default."""
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    if model is None:
        model = tiny_llama(max_position_embeddings=2048)
    save_folder(folder / "tiny", model, tokenizer_config={"chat_template": template})
    given = {"model": folder / "tiny", "cache_dir": link_kernels(folder / "cache")}
    options = given | {f"execute.{name}": value for name, value in SMALL.items()}
    return [word for name, value in options.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    options = settings_for(tmp_path_factory.mktemp("models"))
    environ = {"PIPELINE_API_KEYS": KEY}
    with Deployment("--replicas", "2", "--replica-cpus", "0.5", *options, environ=environ) as deployment:
        deployment.until(lambda found: [one["status"] for one in found] == ["ok", "ok"], "both replicas serve")
        yield deployment


def test_a_dead_replica_s_streams_continue_at_another_one(deployment: Deployment) -> None:
    requests = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/completions", GREEDY)]
    calm = [texts_of(events(deployment.url, body, path)) for path, body in requests]
    direct = deployment.replicas()[0]["url"]
    actor = actor_of(direct)
    priorities = {process.nice() for process in (actor, *actor.children(recursive=True))}
    assert priorities == {psutil.Process().nice()}, "Ray's workers have a lower priority, unless they are asked not to"
    assert texts_of(events(direct, COMPLETION)) == calm[0], "the relay changes nothing"
    resumed = deployment.metric("pipeline_ingress_resumed_streams_total")
    num_ready = 0
    killed = threading.Event()
    lock = threading.Lock()

    def kill() -> None:
        """When all streams have begun, kill the replica that has most of them."""
        nonlocal num_ready
        with lock:
            num_ready += 1
            if num_ready == len(requests):
                kill_busiest(deployment, 2)
                killed.set()
        assert killed.wait(PATIENCE_S)

    with ThreadPoolExecutor(len(requests)) as threads:
        found = list(threads.map(lambda one: texts_of(events(deployment.url, one[1], one[0], (8, kill))), requests))
    assert found == calm
    assert deployment.metric("pipeline_ingress_resumed_streams_total") >= resumed + 1
    assert deployment.metric("pipeline_ingress_broken_streams_total") == 0
    deployment.until(lambda found: [one["status"] for one in found] == ["ok", "ok"], "Serve has replaced the replica")


def status_without_key(url: str) -> int:
    request = urllib.request.Request(f"{url}/v1/completions", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    with refusal.value as response:
        return response.code


def test_only_those_who_may_reach_the_cluster_and_the_servers(deployment: Deployment) -> None:
    """Ray listens on loopback, except for one port of each replica, which Ray Serve opens at all addresses. It needs a
    token, which is in a file that only this user can read. No process's environment or command line has an API key."""
    urls = [deployment.url, *(one["url"] for one in deployment.replicas())]
    assert [status_without_key(url) for url in urls] == [401] * len(urls)
    command = psutil.Process(deployment.process.pid)
    processes = [command, *command.children(recursive=True)]
    for process in processes:
        elsewhere = []
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of Ray that was idle
            name, environ = " ".join(process.cmdline()), process.environ()
            if process is not command:  # its first environment is that of the test
                assert KEY not in name and KEY not in "".join(environ.values())
            for one in process.net_connections("inet"):
                address = ipaddress.ip_address(one.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if one.status == psutil.CONN_LISTEN and not address.is_loopback:
                    elsewhere.append(one.laddr)
        assert len(elsewhere) <= name.startswith("ray::ServeReplica"), (name, elsewhere)
    gcs = next(one for one in processes if one.name() == "gcs_server")
    assert gcs.environ()["RAY_AUTH_MODE"] == "token"
    token = Path(gcs.environ()["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o77 == 0 and token.parent.stat().st_mode & 0o77 == 0
    port = next(one.laddr.port for one in gcs.net_connections("inet") if one.status == psutil.CONN_LISTEN)
    join = f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='error'); print('joined')"
    assert "joined" in python(join, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}).stdout
    assert "joined" not in python(join, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}).stdout


def python(code: str, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    local = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | local | environ, timeout=PATIENCE_S, check=False
    )


def test_servers_that_run_already_are_relayed_to_and_a_signal_lets_streams_end(deployment: Deployment) -> None:
    urls = [one["url"] for one in deployment.replicas()]
    with Deployment("--servers", ",".join(urls)) as relay:
        calm = texts_of(events(relay.url, COMPLETION))
        stop = 5, lambda: relay.process.send_signal(signal.SIGTERM)
        assert texts_of(events(relay.url, COMPLETION, at=stop)) == calm
        assert relay.process.wait(PATIENCE_S) == 0


def test_without_ray_there_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')\n")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "pipeline", "deploy", "--replicas", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .split("\n")[-1]
        .endswith("ray is not installed: run `.venv/bin/pip install -e '.[ray]'` in the clone")
    )
