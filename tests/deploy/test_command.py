"""`pipeline deploy --servers` as a process."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import aiohttp

from tests.deploy.fake_replica import PATIENCE_S, FakeReplica
from tests.deploy.test_relay import BODY, tokens_of

ROOT = Path(__file__).resolve().parents[2]


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
