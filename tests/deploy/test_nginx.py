"""docs/deploy/nginx.conf in Debian's nginx, in front of replicas in this process."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.fake_replica import PATIENCE_S, FakeReplica
from tests.deploy.proxy.streams import BODY, stream, tokens_of
from tests.guardian import guard

CONF = Path(__file__).resolve().parents[2] / "docs/deploy/nginx.conf"
SESSIONS = 48
"""The ring depends on the ports: of this many, all at one server is less likely than 1 in 10^9."""


def started(folder: Path, replicas: list[FakeReplica]) -> "tuple[subprocess.Popen[bytes], int]":
    """An nginx in front of two replicas, and its port."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    assert Path(program).exists(), "this test needs Debian's nginx: apt-get install nginx-light"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONF.read_text()
    for old, new in [("listen 127.0.0.1:8000", f"listen 127.0.0.1:{port}")] + [
        (f"server 127.0.0.1:{8000 + index} ", f"server {replica.name} ") for index, replica in enumerate(replicas, 1)
    ]:
        assert old in text
        text = text.replace(old, new)
    temporary = " ".join(f"{name}_temp_path {folder}/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; {temporary}\n{text}}}\n"
    )
    process = subprocess.Popen([program, "-p", str(folder), "-c", "nginx.conf", "-e", "errors"])
    guard(process)
    return process, port


@asynccontextmanager
async def nginx(folder: Path, replicas: list[FakeReplica]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an nginx in front of two replicas."""
    process, port = started(folder, replicas)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert process.poll() is None, (folder / "errors").read_text()
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.01)
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def in_session(client: aiohttp.ClientSession, name: str) -> str:
    async with client.post("/v1/completions", json=BODY, headers={"X-Session": name}) as response:
        assert response.status == 200
        return await response.text()


@pytest.fixture
async def replicas() -> AsyncIterator[list[FakeReplica]]:
    found = [await FakeReplica().start() for _ in range(2)]
    yield found
    for replica in found:
        await replica.stop()


async def test_a_session_stays_at_one_server_until_that_dies(tmp_path: Path, replicas: list[FakeReplica]) -> None:
    async with nginx(tmp_path, replicas) as client:
        sessions = [f"s{number}" for number in range(SESSIONS)]
        servers: list[set[int]] = []
        for session in sessions:
            servers.append(set())
            for _ in range(3):
                before = len(replicas[0].seen)
                assert tokens_of(await in_session(client, session)) == list(range(20))
                servers[-1].add(0 if len(replicas[0].seen) > before else 1)
        assert all(len(names) == 1 for names in servers), "each session stays at its server"
        counts = [len(replica.seen) for replica in replicas]
        assert sum(counts) == 3 * SESSIONS and all(counts), "both servers have sessions"
        await replicas[0].stop()
        for session in sessions:
            assert tokens_of(await in_session(client, session)) == list(range(20))
        assert len(replicas[1].seen) == counts[1] + SESSIONS


async def test_requests_without_a_session_go_to_all_and_a_full_server_s_to_another(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with nginx(tmp_path, replicas) as client:
        for _ in range(24):
            await stream(client)
        assert all(replica.seen for replica in replicas)
        replicas[0].refuses = 503, {"error": {"code": "overloaded"}}
        for _ in range(8):
            assert tokens_of(await stream(client)) == list(range(20))


async def test_events_are_not_held_back(tmp_path: Path, replicas: list[FakeReplica]) -> None:
    hold = replicas[0].hold = replicas[1].hold = asyncio.Event()
    async with nginx(tmp_path, replicas) as client, client.post("/v1/completions", json=BODY) as response:
        async with asyncio.timeout(PATIENCE_S):
            assert b"t0 " in await response.content.readany(), "the first events come while the stream runs"
        hold.set()
        assert b"[DONE]" in await response.read()
