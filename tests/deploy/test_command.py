"""`pipeline deploy --servers` as a process."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pipeline.__main__ import main
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica
from tests.deploy.proxy.streams import BODY, tokens_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("how", [("--servers", "http://127.0.0.1:9"), ("--replicas", "1")])
def test_without_keys_it_listens_where_a_server_would_and_nowhere_else(
    how: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("pipeline.deploy.run.serve", lambda *args: served.append(args[2]) or 0)
    monkeypatch.setattr("pipeline.deploy.ray.serve.deploy", lambda *args: served.append(args[-1]) or 0)
    assert main(["deploy", *how, "--host", "0.0.0.0"]) == 2
    refusal = capsys.readouterr().err.split("error: ", 1)[1]
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert refusal == capsys.readouterr().err.split("error: ", 1)[1] and "no API keys" in refusal
    assert not served
    assert main(["deploy", *how, "--host", "0.0.0.0", "--set", "gateway.allow_unauthenticated=true"]) == 0
    monkeypatch.setenv("PIPELINE_API_KEYS", "a-key-of-twenty-characters")
    assert main(["deploy", *how, "--host", "0.0.0.0"]) == 0
    assert served[0] is None and served[1].scope_of("a-key-of-twenty-characters")
    assert "PIPELINE_API_KEYS" not in os.environ


async def test_a_signal_lets_streams_end() -> None:
    replicas = [await FakeReplica().start() for _ in range(2)]
    hold = replicas[0].hold = replicas[1].hold = asyncio.Event()
    servers = ",".join(f"http://{replica.name}" for replica in replicas)
    command = [sys.executable, "-m", "pipeline", "deploy", "--port", "0", "--servers", servers]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            seen = ""
            while (match := re.search(r"relaying on (\S+) to 2 of 2 servers", seen)) is None:
                line = await process.stderr.readline()
                assert line, seen
                seen += line.decode()
            async with (
                aiohttp.ClientSession(match[1]) as client,
                client.post("/v1/completions", json=BODY) as response,
            ):
                text = await response.content.readany()
                process.send_signal(signal.SIGINT)
                while True:  # until the drain has begun
                    async with client.get("/health") as health:
                        if (await health.json())["status"] == "draining":
                            break
                hold.set()
                assert tokens_of((text + await response.read()).decode()) == list(range(20))
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for replica in replicas:
            await replica.stop()
