"""SIGTERM at any moment of a start, of a replacement by another server, of a sleep or a wake: all processes end, soon
and with a code that says so, and no line of their log is an error.

With PIPELINE_ALL_CASES=1 there are 40 moments of each kind.
"""

import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.slices import part_of
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

NUM_MOMENTS = part_of(40, 1)
NUM_PARTS = part_of(10, 1)
SEED = 1
END_S = 30.0
KINDS = {
    "start": [],
    "replaced": ["restart", "--new-version"],
    "stopped first": ["restart", "--new-version", "--stop-first"],
    "sleep": [],
}
LAST_S = {"start": 1.5, "replaced": 4.0, "stopped first": 4.0, "sleep": 0.5}
"""The latest moment, some time after the end of what it is in, on a machine with nothing else to do."""
TABLES = """
cache_dir = "{folder}/cache"
[execute]
kv_cache_bytes = "1MiB"
num_threads = 1
[gateway]
enable_sleep_mode = true
[models.one]
model = "{folder}/one"
[models.two]
model = "{folder}/two"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    link_kernels(folder / "cache")
    for number, name in enumerate(("one", "two")):
        save_folder(folder / name, tiny_llama(num_hidden_layers=1 + number))
    (folder / "several.toml").write_text(TABLES.format(folder=folder))
    return folder


def server_of(folder: Path, several: bool, until_ready: bool) -> Server:
    if several:
        return Server(config=folder / "several.toml", until_ready=until_ready)
    sets = f"model={folder}/one", f"cache_dir={folder}/cache", "execute.num_threads=1", "gateway.enable_sleep_mode=true"
    return Server(*sets, until_ready=until_ready)


def change(server: Server, several: bool) -> None:
    """Sleep and wake up again, until the server is gone."""
    model = "&model=one" if several else ""
    try:
        for path in (f"/sleep?level=1{model}", f"/wake_up?tags=weights{model}"):
            request = urllib.request.Request(f"{server.url}{path}", method="POST")
            urllib.request.urlopen(request, timeout=END_S).close()
    except (urllib.error.URLError, OSError):
        pass


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
def test_all_processes_end(folder: Path, kind: str, several: bool, part: int) -> None:
    for number in range(part, NUM_MOMENTS, NUM_PARTS):
        dice = random.Random(f"{SEED}:{kind}:{several}:{number}")
        moment_s = dice.uniform(0.0, LAST_S[kind])
        with server_of(folder, several, kind != "start") as server:
            helper: subprocess.Popen[bytes] | threading.Thread | None = None
            if kind == "start":
                server.wait_for_line("starting", END_S)
            elif KINDS[kind]:
                port = server.url.rpartition(":")[2]
                command = [sys.executable, "-m", "pipeline", *KINDS[kind], "--port", port, "--timeout", str(END_S)]
                helper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                server.wait_for_line("starting the next server|the server ends, and starts again", END_S)
            else:
                helper = threading.Thread(target=change, args=(server, several))
                helper.start()
            time.sleep(moment_s)
            began_s = time.monotonic()
            code = server.stop(signal.SIGTERM, END_S)
            took_s = time.monotonic() - began_s
            match helper:
                case subprocess.Popen():
                    helper.wait(2 * END_S)
                case threading.Thread():
                    helper.join(2 * END_S)
        said = f"{kind}, at {moment_s:.2f} s, after {took_s:.2f} s:\n{server.log()}"
        assert code in (0, 128 + signal.SIGTERM, -signal.SIGTERM), said
        assert not re.search(r"\b(ERROR|Traceback)\b", server.log()), said
