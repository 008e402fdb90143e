"""A stand-in for llama-server and for the Python of vLLM: a server that counts words, and a child that outlives it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]
EXIT_CODE = 7


def write_program(path: Path, record: Path, mode: str = "serves", version: str = "fake 1.2") -> Path:
    """Write an executable. When it serves, it writes its arguments, its process ids and what it was asked to `record`.

    Modes: "serves"; "exits" (before it is ready); "fails" (refuses every request); "stays" (ignores SIGTERM).
    """
    arguments = f"{str(record)!r}, {mode!r}, {version!r}"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.tools.fake_peer import main\nmain({arguments})\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def main(record: str, mode: str, version: str) -> None:
    if "--version" in sys.argv or "-c" in sys.argv:
        print(version)
        return
    if mode == "exits":
        print("fake: out of luck")
        sys.exit(EXIT_CODE)
    if mode == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    with FakeServer(lambda body, number: "refuse" if mode == "fails" else None, port, num_unhealthy=2) as server:
        seen = {
            "argv": sys.argv,
            "env": dict(os.environ),
            "pids": [os.getpid(), child.pid],
            "port": port,
            "group": os.getpgrp(),
        }
        partial = Path(record).with_suffix(".partial")
        partial.write_text(json.dumps(seen), encoding="utf-8")
        partial.rename(record)
        assert server.url.endswith(f":{port}")
        while True:
            signal.pause()
