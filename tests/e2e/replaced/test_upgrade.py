"""A new version is installed over the code of a running server, and its stages are restarted one after the other, or
the whole server is.

It starts a server from a copy of the code, so it is collected only with PIPELINE_ALL_KILLS=1.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server
from tests.e2e.zmq_streams import connected

pytestmark = pytest.mark.usefixtures("smollm2_dir")
ROOT = Path(__file__).parents[3]
STAGES = ("ingest", "schedule", "execute", "detokenize", "gateway")
"""In the order in which they are upgraded."""
NEW = "--new-version"


class Installation:
    """A copy of the code that is not part of the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("pipeline", "stages", "kernels", "shm", "config"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        # Safe path: the working directory, which has this code, comes after the copy.
        self.environ = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def change(self, path: str, old: str, new: str, *, first: bool = False) -> None:
        """Edit the code, as the installation of another version does: the only place, or the first one."""
        code = (self.folder / path).read_text()
        assert first or code.count(old) == 1, f"{path} has {code.count(old)} times {old!r}"
        (self.folder / path).write_text(code.replace(old, new, 1))

    def restart(self, server: Server, *what: str) -> "subprocess.CompletedProcess[str]":
        port = str(urllib.parse.urlsplit(server.url).port)
        command = [sys.executable, "-m", "pipeline", "restart", *what, "--port", port]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | self.environ, cwd=self.folder
        )


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.fixture
def server(installation: Installation) -> Iterator[Server]:
    with Server("schedule.policy=priority", "chat.reasoning_parser=qwen3", environ=installation.environ) as server:
        yield server


def version_of(server: Server) -> str:
    """As a gateway says it."""
    with urllib.request.urlopen(f"{server.url}/version", timeout=10) as response:
        return str(response.read())


def test_a_server_is_upgraded_stage_by_stage_under_load(server: Server, installation: Installation) -> None:
    """Streams of the gateway's ZeroMQ clients go on, also when it is replaced."""

    async def receive() -> object:
        async with connected(server.zmq) as clients:
            return await clients.run()

    streams = requests(40)
    undisturbed = asyncio.run(run(server.url, streams, Ledger())), asyncio.run(receive())
    assert "0.1.0" in version_of(server)
    installation.change("pipeline/version.py", 'VERSION = "0.1.0"', 'VERSION = "0.1.1"')
    installation.change(
        "pipeline/runtime/stage.py",
        "        self.supervisor.send(m.Ready(facts))\n",
        '        from pipeline.version import VERSION\n\n        self.log.info(f"runs version {VERSION}")\n'
        "        self.supervisor.send(m.Ready(facts))\n",
    )
    over = threading.Event()
    received: list[object] = []

    def upgrade() -> None:
        try:
            for stage in STAGES:
                done = installation.restart(server, stage)
                assert done.returncode == 0, done.stderr
                server.wait_for_line(rf"{stage}\.0 runs version 0\.1\.1", 10)
        finally:
            over.set()

    upgrading = threading.Thread(target=upgrade)
    upgrading.start()
    while not over.is_set() or not received:
        received.append(asyncio.run(receive()))
        assert received[-1] == undisturbed[1]
    upgrading.join()
    server.until(lambda health: health["status"] == "ok")
    assert sum("runs version 0.1.1" in line for line in server.lines) == len(STAGES)
    assert "0.1.1" in version_of(server)
    assert asyncio.run(run(server.url, streams, Ledger())) == undisturbed[0]
    server.until_idle()
    server.look()


def test_a_version_with_other_messages_is_refused_and_the_stage_serves_on(
    server: Server, installation: Installation
) -> None:
    installation.change(
        "pipeline/runtime/messages/ingest.py",
        "    gateway_incarnation: int = 1\n",
        "    gateway_incarnation: int = 1\n    more: int = 0\n",
    )
    before = server.health()["stages"]
    done = installation.restart(server, "schedule")
    assert done.returncode == 1
    assert "whose stages don't understand those of the running server; restart the whole server" in done.stderr
    assert [one["pid"] for one in server.health()["stages"]] == [one["pid"] for one in before]


def test_a_new_version_with_other_messages_takes_over_and_no_stream_notices(
    server: Server, installation: Installation
) -> None:
    """All processes are new, of the supervisor too: it may differ in everything."""
    streams = requests(40)
    undisturbed = asyncio.run(run(server.url, streams, Ledger()))
    before = {one["pid"] for one in server.health()["stages"]}
    installation.change("pipeline/version.py", 'VERSION = "0.1.0"', 'VERSION = "0.1.1"')
    installation.change(
        "pipeline/runtime/messages/ingest.py",
        "    gateway_incarnation: int = 1\n",
        "    gateway_incarnation: int = 1\n    more: int = 0\n",
    )
    ledger, done = Ledger(), []
    begun = threading.Event()
    upgrading = threading.Thread(target=lambda: done.append((begun.wait(60), installation.restart(server, NEW))[1]))
    upgrading.start()
    ledger.on_event(lambda _: begun.set())
    while not done:
        assert asyncio.run(run(server.url, streams, ledger)) == undisturbed
    upgrading.join()
    assert done[0].returncode == 0, done[0].stderr
    assert "0.1.1" in version_of(server)
    assert before.isdisjoint(one["pid"] for one in server.health()["stages"])
    assert asyncio.run(run(server.url, streams, Ledger())) == undisturbed
    assert server.process.poll() is None, "the process that a service manager watches stays"


def test_a_version_that_does_not_start_changes_nothing(server: Server, installation: Installation) -> None:
    installation.change("pipeline/version.py", 'VERSION = "0.1.0"', 'VERSION = "0.1.1"')
    installation.change("pipeline/stages/schedule/stage.py", "import ", "import no_such_module\nimport ", first=True)
    before = server.health()["stages"]
    done = installation.restart(server, NEW)
    assert done.returncode == 1 and "the next server did not start" in done.stderr
    assert [one["pid"] for one in server.health()["stages"]] == [one["pid"] for one in before]
