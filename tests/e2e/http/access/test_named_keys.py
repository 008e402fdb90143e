"""A real server with named keys: gateways share limits and counters, which outlive them, and keys can change."""

import hashlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.server import Server

ALICE, BOB, CAROL = "sk-of-alice-4f1c0e6d9a", "sk-of-bob-9a8b7c6d5e4f", "sk-of-carol-77aa55cc33"


def settings(*tables: str) -> str:
    head = '[gateway]\nreplicas = 2\n[execute]\nkv_cache_bytes = "64MiB"\n[access_log]\nfile = "{log}"\n'
    return head + "\n".join(f"[[keys]]\n{table}" for table in tables)


def by_digest(name: str, key: str, more: str = "") -> str:
    return f'name = "{name}"\ndigest = "{hashlib.sha256(key.encode()).hexdigest()}"\n{more}'


def complete(server: Server, key: str, **body: Any) -> tuple[int, str]:
    """A completion on a connection of its own, which either gateway may get."""
    data = json.dumps({"prompt": "Once", "max_tokens": 5, "ignore_eos": True} | body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def command(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pipeline", *args, "--pid", str(server.process.pid)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def usage(server: Server) -> dict[str, dict[str, Any]]:
    found = command(server, "usage", "--json")
    assert found.returncode == 0, found.stderr
    return {one["name"]: one for one in json.loads(found.stdout)["keys"]}


def until(what: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_named_keys_on_a_real_server(tmp_path: Path) -> None:
    config, file, log = tmp_path / "pipeline.toml", tmp_path / "bob", tmp_path / "access.log"
    text = settings(by_digest("alice", ALICE, "rpm = 6"), f'name = "bob"\nfile = "{file}"').format(log=log)
    config.write_text(text)
    file.write_text(BOB)
    file.chmod(0o600)
    with Server(config=config, options=("--instant",)) as server:
        answers = [complete(server, ALICE)[0] for _ in range(10)]
        assert answers == [200] * 6 + [429] * 4, "both gateways share one limit"
        assert complete(server, BOB)[0] == 200
        used = usage(server)
        alice = used["alice"]
        assert (alice["requests"], alice["output_tokens"], alice["rejected"]["rate_limit"]) == (6, 30, 4)
        assert (used["bob"]["requests"], used["bob"]["output_tokens"]) == (1, 5)

        for process in [one for one in server.seen.values() if one.cmdline()[:1] and "gateway" in one.cmdline()[0]]:
            process.kill()
            psutil.wait_procs([process], 10)
        until(lambda: "gateway.1 is back" in "\n".join(server.lines) and "gateway.0 is back" in "\n".join(server.lines))
        server.until(lambda health: health["status"] == "ok")
        server.look()
        assert usage(server) == used, "a gateway's death loses no counts"
        assert complete(server, ALICE)[0] == 429, "nor the limit's minute"
        metrics = urllib.request.urlopen(f"{server.url}/metrics", timeout=30).read().decode()
        assert 'pipeline_key_output_tokens_total{key="alice"} 30' in metrics

        file.write_text("two words")
        bad = command(server, "reload")
        assert bad.returncode == 1 and "a key must have 1 to 512 visible ASCII characters" in bad.stderr
        assert complete(server, BOB)[0] == 200, "the old keys stay"

        file.write_text(CAROL)
        config.write_text(text.replace("rpm = 6", "rpm = 60"))
        good = command(server, "reload")
        assert good.stdout.splitlines() == [
            "keys: changed: used at once",
            "API keys: changed alice, bob: used at once",
            "changed; restarted no stage",
        ], good.stderr
        assert [complete(server, key)[0] for key in (BOB, CAROL, ALICE)] == [401, 200, 200]
        assert command(server, "reload").stdout == "no setting has changed\n"
        assert usage(server)["bob"]["requests"] == 3

        config.write_text(text.partition("[[keys]]")[0])
        none = command(server, "reload")
        assert none.returncode == 1 and "a server with API keys can have none only by a restart" in none.stderr
        server.look()
    for key in (ALICE, BOB, CAROL):
        assert key not in log.read_text() + "\n".join(server.lines)
        assert hashlib.sha256(key.encode()).hexdigest() not in log.read_text() + "\n".join(server.lines)
